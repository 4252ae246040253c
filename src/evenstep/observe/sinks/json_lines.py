"""Figures as a line of JSON for each moment: for pandas, jq, and whatever reads files."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from evenstep.errors import ConfigError
from evenstep.lines import end_of_lines

FIRST = b'{"unix_s":'
"""How each line begins."""


class JsonLines:
    """Appends to a file; a resumed run continues it."""

    def __init__(self, target: str) -> None:
        if not target:
            raise ConfigError("", "jsonlines needs a file: jsonlines:figures.jsonl")
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(target, flags, 0o644)
        self._rest = b""  # of a line that a full disk has cut in two
        if os.fstat(self._file).st_size:  # else it is new, or no file but a pipe
            end = end_of_lines(self._file)
            rest = os.pread(self._file, len(FIRST), end)
            if FIRST.startswith(rest):  # likewise, and then the process was killed
                os.ftruncate(self._file, end)

    def write(self, unix_s: float, step: int, figures: Mapping[str, float]) -> None:
        """One line more, once the one before is complete."""
        self._finish_line()
        self._rest = msgspec.json.encode({"unix_s": unix_s, **figures, "step": step}) + b"\n"
        self._finish_line()

    def _finish_line(self) -> None:
        while self._rest:
            self._rest = self._rest[os.write(self._file, self._rest) :]

    def close(self) -> None:
        """Close the file; what was written is there already."""
        os.close(self._file)
