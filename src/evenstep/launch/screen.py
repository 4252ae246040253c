"""The bottom of a terminal: rows that are redrawn in place, while lines scroll above them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

from evenstep.observe.block import Style

_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"  # erasing counts rows, so none of them may wrap


class BottomRows:
    """What is drawn at the bottom now, and the text that changes it."""

    def __init__(self) -> None:
        self._drawn: list[str] = []

    def redraw(self, lines: Sequence[str], rows: Sequence[str]) -> str:
        """The text that prints more lines above these rows; empty if nothing changes."""
        if not lines and list(rows) == self._drawn:
            return ""
        above = len(self._drawn) - 1
        up = f"\x1b[{above}A" if above > 0 else ""
        erase = f"\r{up}\x1b[J" if self._drawn or rows else ""
        self._drawn = list(rows)
        below = "\n".join(rows)
        below = f"{_NO_WRAP}{below}{_WRAP}" if rows else ""
        return "".join([erase, *(f"{line}\n" for line in lines), below])


def terminal_width(out: TextIO) -> int:
    """The columns of a terminal."""
    try:
        return os.get_terminal_size(out.fileno()).columns or 80  # 0: a terminal without a size
    except (OSError, ValueError):
        return 80


def terminal_style(out: TextIO) -> Style:
    """What a terminal can show; `NO_COLOR` is heeded."""
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    unicode = (out.encoding or "").lower().replace("-", "") in ("utf8", "utf16")
    return Style(colour=out.isatty() and not plain, unicode=unicode)
