"""The lines of a journal as they come, decoded lean: a picture needs no validated reports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from evenstep.errors import InvalidInputError, JournalError
from evenstep.journal import Header, Record, read
from evenstep.types import (
    AnyAction,
    DrainAsked,
    Estimate,
    Joined,
    LaunchFailed,
    Left,
    Lost,
    Resumed,
    SizeAsked,
    Steps,
    WorkerId,
)
from evenstep.wire import MAX_BYTES, Codec

READ_BYTES = 1 << 20
"""Read at once: a line has kilobytes, and smaller reads take a tenth of the time in all."""

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0.0)]
Row = tuple[WorkerId, Count, Seconds, Seconds, float, float, float, float]
"""A report as the journal has it: worker, samples, compute_s, wait_s, free CPU, free memory,
grad_squared_norm, spread_s."""


class LeanStep(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="StepDone"):
    """A step, its reports as plain rows."""

    step: int
    generation: int
    seconds: Annotated[float, Meta(gt=0.0)]
    reports: tuple[Row, ...]
    forecasts: tuple[float | None, ...] | None = None
    grad_squared_norm: float = 0.0
    quiet: Steps = Steps()
    earlier: Steps = Steps()
    position: int = 0
    idle_s: float = 0.0


class LeanRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """A record with a lean step in place of a step."""

    at_s: float = msgspec.field(name="at")
    event: LeanStep | Joined | Left | Lost | LaunchFailed | SizeAsked | DrainAsked | Resumed
    actions: tuple[AnyAction, ...] = ()
    estimate: Estimate | UnsetType = UNSET
    paces: tuple[float | None, ...] | UnsetType = UNSET


_lean: Codec[LeanRecord] = Codec(LeanRecord, checksum=True)
_full: Codec[Record] = Codec(Record, checksum=True)


class JournalLines:
    """Reads on in a journal, each time up to its last whole line.

    Raises JournalError if it has no header that this version reads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Header
        self.problem = ""  # why nothing after some line is read, or nothing for now
        self._is_refused = False  # what follows is of no use
        self.is_torn = False  # there is more, but no whole line
        self._open()

    def _open(self) -> None:
        self.header, _ = read(self.path)
        self._file: int | None = None  # its number in the file system
        self._offset, self._num_lines, self._num_bytes = 0, 0, 0
        self.problem, self._is_refused, self.is_torn = "", False, False

    @property
    def bytes_read(self) -> tuple[int, int]:
        """So far, and how many there were when reading began last."""
        return self._offset, max(self._offset, self._num_bytes)

    @property
    def is_replaced(self) -> bool:
        """Another file is there now, or a shorter one: begin anew."""
        try:
            now = os.stat(self.path)
        except OSError:
            return False  # nothing to begin with
        return self._file is not None and (now.st_ino != self._file or now.st_size < self._offset)

    def new(self) -> Iterator[LeanRecord | Record]:
        """The records that were added since."""
        if self._is_refused:
            return
        self.problem = ""  # a disk that did not answer may do so again
        try:
            with self.path.open("rb", buffering=READ_BYTES) as file:
                found = os.fstat(file.fileno())
                if self._file not in (
                    None,
                    found.st_ino,
                ):  # replaced: begin anew next time
                    return
                self._file, self._num_bytes = found.st_ino, found.st_size
                file.seek(self._offset)
                for _ in count():
                    line = file.readline(MAX_BYTES + 1)
                    self.is_torn = bool(line) and not line.endswith(b"\n")
                    if not line or (self.is_torn and len(line) <= MAX_BYTES):
                        return
                    record = self._decoded(line)
                    if record is not None:
                        yield record
                    if self._is_refused:
                        return
                    self._offset += len(line)
                    self._num_lines += 1
        except OSError as e:
            self.problem = f"{self.path}: cannot be read: {e.strerror}"
        except JournalError as e:
            self._leave_out(e)

    def refuse(self, problem: str) -> None:
        """The record read last cannot be used, nor can what follows."""
        self._leave_out(JournalError(str(self.path), self._num_lines + 1, problem))

    def _leave_out(self, error: JournalError) -> None:
        self.problem, self._is_refused = f"{error}; what follows is left out", True

    def _decoded(self, line: bytes) -> LeanRecord | Record | None:
        if not self._num_lines:
            return None  # the header
        try:
            return _lean.decode(line)
        except InvalidInputError:
            pass
        try:
            return _full.decode(line)  # reports of older versions are shorter
        except InvalidInputError as e:
            raise JournalError(str(self.path), self._num_lines + 1, e.problem) from None
