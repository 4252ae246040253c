"""Stop requests: signals, debounced, and output whose reader is gone."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import click

DEBOUNCE_S = 1.0


def stop_signals() -> list[signal.Signals]:
    """The signals that ask for a stop; without SIGHUP under `nohup`, which ignores it."""
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    return [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]


def on_stop_signals(ctx: click.Context, handle: Callable[[int, FrameType | None], object]) -> None:
    """Handle requests to stop until the command is over."""

    def restore(number: int, before: Any) -> None:
        signal.signal(number, before or signal.SIG_DFL)

    for number in stop_signals():
        ctx.call_on_close(partial(restore, number, signal.signal(number, handle)))


def piped_outputs() -> list[int]:
    """Those of standard output and error that are pipes, whose reader may close them."""
    return [fd for fd in (1, 2) if stat.S_ISFIFO(os.fstat(fd).st_mode)]


def discard_output(*fds: int) -> None:
    """Redirect these file descriptors to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in fds:
        os.dup2(nowhere, fd)
    os.close(nowhere)


def echo(text: str) -> None:
    """Print to standard error; a closed terminal is no error."""
    with suppress(OSError):
        click.echo(text, err=True)


def discard_unwritable() -> None:
    """Drop output that cannot be written, as to a closed terminal: it must not fail the exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            discard_output(stream.fileno())


class StopRequests:
    """Counts stop requests; ignores signals within DEBOUNCE_S of the last one counted.

    `timeout` and terminals signal both a process and its group, so the process gets two signals.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num = 0
        self._clock = clock
        self._counted_s = 0.0

    def count_signal(self) -> bool:
        """Count a signal; False if it repeats the last one."""
        now_s = self._clock()
        if self.num and now_s - self._counted_s < DEBOUNCE_S:
            return False
        self.num, self._counted_s = self.num + 1, now_s
        return True
