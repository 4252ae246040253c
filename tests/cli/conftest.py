"""Fixtures of the command line's tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _signals_are_heard() -> Iterator[None]:
    """Commands inherit what is ignored: SIGHUP under `nohup`, SIGINT in a shell's background."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)}
    for number, handler in before.items():
        if handler is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
