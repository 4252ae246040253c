"""The live view of `evenstep run`: a block at the bottom of a terminal, or a line now and then."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, TextIO

from evenstep.launch.console import ConsoleOutput
from evenstep.launch.logs import log_through
from evenstep.launch.screen import terminal_style, terminal_width
from evenstep.observe.block import block, duration, one_line

log = logging.getLogger("evenstep")

BLOCK_S = 0.5
LINE_S = 10.0
STALLED_S = 600.0
"""Most between two lines on a run that makes no step."""

Status = Callable[[], Mapping[str, Any]]


def log_above(console: ConsoleOutput) -> AbstractContextManager[None]:
    """Print log lines above the live block meanwhile, if both go to one terminal."""
    both = console.is_terminal and sys.stderr.isatty()
    return log_through(console.say) if both else nullcontext()


@asynccontextmanager
async def live_view(status: Status, console: ConsoleOutput, out: TextIO) -> AsyncIterator[None]:
    """Show a run until it is over."""
    task = asyncio.create_task(_show(status, console, out))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        console.show_below(())


async def _show(status: Status, console: ConsoleOutput, out: TextIO) -> None:
    try:
        if console.is_terminal:
            await _draw(status, console, out)
        else:
            await _tell(status)
    except Exception:  # no reason to stop training
        log.exception("the run is not shown any more")


async def _draw(status: Status, console: ConsoleOutput, out: TextIO) -> None:
    style = terminal_style(out)
    while True:
        console.show_below(block(status(), terminal_width(out), style))
        await asyncio.sleep(BLOCK_S)


async def _tell(status: Status) -> None:
    teller = Teller(status())
    while True:
        await asyncio.sleep(LINE_S)
        if line := teller.line(status()):
            log.info("%s", line)


class Teller:
    """What to print of a run now and then: ever more rarely while no step is made."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._step, self._stepped_s = status["step"], float(status["at_s"])
        self._told_s = 0.0  # of the stall, when it was last told

    def line(self, status: Mapping[str, Any]) -> str:
        """The line for a status; empty if it would say again what was said."""
        if status["step"] > self._step:
            self._step, self._stepped_s = status["step"], status["at_s"]
            self._told_s = 0.0
            return one_line(status)
        stalled_s = status["at_s"] - self._stepped_s
        if stalled_s < min(2 * self._told_s, self._told_s + STALLED_S):
            return ""
        self._told_s = stalled_s
        return f"{one_line(status)}, no step for {duration(stalled_s)}"
