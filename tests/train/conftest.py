"""Fixtures for tests whose ranks are threads of one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_automatic_collection() -> Iterator[None]:
    """Keep the garbage collector from running inside torch, which ranks as threads can deadlock on.

    `torch.get_rng_state` allocates while it holds the generator's mutex. A collection there calls
    Hypothesis's Python hook, which may hand the GIL to another rank that waits for that mutex.
    """
    gc.disable()
    yield
    gc.enable()
