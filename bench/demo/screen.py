"""The demo's screen: lines, with the live block of the run below them on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from evenstep.launch.screen import BottomRows, terminal_style, terminal_width
from evenstep.observe.block import block, one_line

LINE_S = 10.0  # between two lines of a run, where there is no terminal


class Screen:
    """Lines stay; the block is drawn anew below them."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out, self._rows, self._style = out, BottomRows(), terminal_style(out)
        self._next_line_s = 0.0

    def say(self, line: str = "") -> None:
        """Print a line that stays, above the block."""
        self._write([line], [])

    def show(self, status: Mapping[str, Any]) -> None:
        """The run as it is now: what `evenstep run` shows below its output."""
        if self._out.isatty():
            self._write([], block(status, terminal_width(self._out), self._style))
        elif time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + LINE_S
            self._write([f"    {one_line(status)}"], [])

    def wait(self, what: str) -> None:
        """What is being waited for; the next line or block replaces it."""
        if self._out.isatty():
            self._write([], [f"{what} ..."])
        else:
            self._write([f"{what} ..."], [])

    def clear(self) -> None:
        """Remove the block."""
        self._write([], [])

    def _write(self, lines: list[str], rows: list[str]) -> None:
        self._out.write(self._rows.redraw(lines, rows))
        self._out.flush()
