"""The record of a run: one JSON line per event, with the actions decided on it.

An event and its actions are one line and one write, so they are never separated. A crash can only
truncate the last line, which reading drops. Any other damage raises an error with the line number.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from evenstep import __version__
from evenstep.config import Settings
from evenstep.errors import InvalidInputError, JournalError
from evenstep.types import AnyAction, AnyEvent
from evenstep.wire import MAX_BYTES, Codec

T = TypeVar("T")

FORMAT = 1


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line: what a replay needs."""

    format: int = FORMAT
    evenstep: str = __version__
    settings: Settings
    about: dict[str, Any] = {}


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One event and the actions decided on it."""

    at_s: float = msgspec.field(name="at")  # on the run's own clock
    event: AnyEvent
    actions: tuple[AnyAction, ...] = ()


class _Version(msgspec.Struct):
    format: int


_versions: Codec[_Version] = Codec(_Version)
_headers: Codec[Header] = Codec(Header)
_records: Codec[Record] = Codec(Record)


class Journal:
    """The only writer of one journal file; appends whole lines. See `create` and `resume`."""

    def __init__(self, path: Path, file: int) -> None:
        self.path = path
        self._file = file
        self._end = os.fstat(file).st_size

    @classmethod
    def create(
        cls, path: Path | str, settings: Settings, about: dict[str, Any] | None = None
    ) -> Journal:
        """A new journal; never overwrites an existing one."""
        header = Header(settings=settings, about=about or {})
        line = _headers.encode(header)
        if _headers.decode(line) != header:
            raise InvalidInputError(
                "settings", "cannot be stored as JSON; use only numbers, text, lists and mappings"
            )
        path = Path(path)
        journal = cls(path, _open(path, os.O_CREAT | os.O_EXCL))
        journal._write(line)
        return journal

    @classmethod
    def resume(cls, path: Path | str) -> Journal:
        """Continue a journal, after removing a truncated last line."""
        path = Path(path)
        file = _open(path, 0)
        try:
            _header(path)
            os.ftruncate(file, _end_of_lines(file))
            return cls(path, file)
        except BaseException:
            os.close(file)
            raise

    def append(self, at_s: float, event: AnyEvent, actions: tuple[AnyAction, ...]) -> None:
        """Write one record to the operating system: it survives a crash of this process."""
        if not math.isfinite(at_s):
            raise InvalidInputError("at_s", f"must be finite, got {at_s}")
        self._write(_records.encode(Record(at_s=at_s, event=event, actions=actions)))

    def close(self) -> None:
        """Close the file; further writes raise."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(self, line: bytes) -> None:
        if self._file < 0:
            raise JournalError(str(self.path), 0, "is closed; resume it to continue writing")
        try:
            if os.write(self._file, line) < len(line):
                os.ftruncate(self._file, self._end)  # undo a partial write to a full disk
                raise JournalError(str(self.path), 0, "cannot be written: the disk is full")
        except OSError as e:
            raise JournalError(str(self.path), 0, f"cannot be written: {e.strerror}") from e
        self._end += len(line)


class Records:
    """The records of a journal, read from the file on every iteration."""

    def __init__(self, path: Path, *, torn: bool) -> None:
        self.path = path
        self.torn = torn  # the last line is truncated and was dropped

    def __iter__(self) -> Iterator[Record]:
        with self.path.open("rb") as file:
            file.readline(MAX_BYTES)  # the header
            for number in count(2):
                line = file.readline(MAX_BYTES + 1)
                if not line.endswith(b"\n") and len(line) <= MAX_BYTES:
                    return
                yield _decode(_records, self.path, number, line)


def read(path: Path | str) -> tuple[Header, Records]:
    """The header and, lazily, the records. `records.torn`: the last line is truncated."""
    path = Path(path)
    header = _header(path)
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return header, Records(path, torn=file.read(1) != b"\n")


def _header(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            line = file.readline(MAX_BYTES + 1)
    except OSError as e:
        raise JournalError(str(path), 0, f"cannot be read: {e.strerror}") from None
    if not line.endswith(b"\n"):
        raise JournalError(str(path), 1, "has no complete header; is this a journal?")
    version = _decode(_versions, path, 1, line).format
    if version != FORMAT:
        raise JournalError(str(path), 1, f"has format {version}; this evenstep reads {FORMAT}")
    return _decode(_headers, path, 1, line)


def _decode(codec: Codec[T], path: Path, number: int, line: bytes) -> T:
    try:
        return codec.decode(line)
    except InvalidInputError as e:
        raise JournalError(str(path), number, e.problem) from None


def _open(path: Path, flags: int) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o644)
    except FileExistsError:
        raise JournalError(
            str(path), 0, "exists already and is not overwritten; choose another file, or resume it"
        ) from None
    except OSError as e:
        raise JournalError(str(path), 0, f"cannot be opened: {e.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise JournalError(str(path), 0, "is being written by another process") from None
    return file


def _end_of_lines(file: int) -> int:
    """The number of bytes up to the end of the last complete line."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - 2**16)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
