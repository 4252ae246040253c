"""The record of a run: one JSON line per event, with the actions decided on it.

An event and its actions are one line and one write, so they are never separated. A crash can only
truncate the last line, which reading drops. Any other damage raises an error with the line number:
each line ends with a checksum of the rest of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from evenstep import __version__
from evenstep.config import Settings
from evenstep.errors import InvalidInputError, JournalError, JournalFormatError
from evenstep.lines import LineFile, sync_folder
from evenstep.types import AnyAction, AnyEvent, Estimate, Plan, Stay, StepDone
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
    """One event and the actions decided on it.

    What people see of a step beyond it goes with it, where there is any: a replay ignores it.
    """

    at_s: float = msgspec.field(name="at")  # on the run's own clock
    event: AnyEvent
    actions: tuple[AnyAction, ...] = ()
    estimate: Estimate | UnsetType = UNSET  # the limit and equal shares, about once a second
    paces: tuple[float | None, ...] | UnsetType = UNSET  # of the reports: what was forecast, came


class _Version(msgspec.Struct):
    format: int


_versions: Codec[_Version] = Codec(_Version, checksum=True)
_headers: Codec[Header] = Codec(Header, checksum=True)
_records: Codec[Record] = Codec(Record, checksum=True)


class Journal:
    """The only writer of one journal file; appends whole lines. See `create` and `resume`.

    Records wait in memory while the disk is full, fails or is read-only. If too many wait, steps
    that changed nothing but shares are dropped.
    """

    def __init__(self, path: Path, lines: LineFile) -> None:
        self.path, self._lines = path, lines
        self._unsynced = False  # a record that must not be forgotten may not be on the disk

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
        journal._lines.append(line)
        return journal

    @classmethod
    def resume(cls, path: Path | str) -> Journal:
        """Continue a journal, after removing a truncated last line."""
        path = Path(path)
        _header(path)
        return cls(path, _open(path, 0))

    @property
    def problem(self) -> str:
        """Why records wait; empty if none do."""
        return self._lines.problem

    def append(self, at_s: float, event: AnyEvent, actions: tuple[AnyAction, ...]) -> None:
        """Write one record; see `write`."""
        self.write(Record(at_s=at_s, event=event, actions=actions))

    def write(self, record: Record) -> None:
        """Write one record to the operating system: it survives a crash of this process."""
        if not math.isfinite(record.at_s):
            raise InvalidInputError("at_s", f"must be finite, got {record.at_s}")
        line = _records.encode(record)
        minor = all(isinstance(action, Plan | Stay) for action in record.actions)
        try:
            self._lines.append(line, droppable=minor and isinstance(record.event, StepDone))
        except ValueError as e:
            raise JournalError(str(self.path), 0, str(e)) from None
        self._unsynced |= not minor

    def sync(self) -> None:
        """Force records to the disk, if one of them changes more than shares."""
        if self._unsynced:
            self._unsynced = False
            self._lines.sync()

    def flush(self) -> None:
        """Write the records that wait, if that is possible by now."""
        self._lines.flush()

    def cut(self, num_bytes: int) -> Path:
        """Keep the first bytes, and the whole file under another name, which is returned.

        Nothing is copied into the file that is set aside, so this also works on a full disk.
        """
        with self.path.open("rb") as file:
            kept = file.read(num_bytes)
        fresh = self.path.with_name(f".{self.path.name}")
        fresh.unlink(missing_ok=True)
        lines = _open(fresh, os.O_CREAT | os.O_EXCL)
        lines.append(kept)
        lines.sync()
        aside = set_aside(self.path)
        fresh.rename(self.path)
        sync_folder(self.path.parent)
        self._lines.close()
        lines.path, self._lines = self.path, lines
        return aside

    def close(self) -> None:
        """Close the file; further writes raise. Raises JournalError if records are lost."""
        self._lines.close()
        if self._lines.num_lost:
            problem = f"cannot be written: {self._lines.num_lost} records are lost"
            raise JournalError(str(self.path), 0, problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Records:
    """The records of a journal, read from the file on every iteration."""

    def __init__(self, path: Path, *, torn: bool) -> None:
        self.path = path
        self.torn = torn  # the last line is truncated and was dropped
        self.num_bytes = 0  # up to the end of the line before the one last read
        self.num_lines = 0  # likewise

    def __iter__(self) -> Iterator[Record]:
        with self.path.open("rb") as file:
            line = file.readline(MAX_BYTES)  # the header
            self.num_bytes = 0
            for number in count(2):
                self.num_bytes, self.num_lines = self.num_bytes + len(line), number - 1
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
        problem = f"has format {version}; this evenstep reads {FORMAT}"
        raise JournalFormatError(str(path), 1, problem)
    return _decode(_headers, path, 1, line)


def _decode(codec: Codec[T], path: Path, number: int, line: bytes) -> T:
    try:
        return codec.decode(line)
    except InvalidInputError as e:
        raise JournalError(str(path), number, e.problem) from None


def _open(path: Path, flags: int) -> LineFile:
    try:
        return LineFile(path, flags)
    except FileExistsError:
        raise JournalError(
            str(path), 0, "exists already and is not overwritten; choose another file, or resume it"
        ) from None
    except BlockingIOError:
        raise JournalError(str(path), 0, "is being written by another process") from None
    except OSError as e:
        raise JournalError(str(path), 0, f"cannot be opened: {e.strerror}") from None


def set_aside(path: Path) -> Path:
    """Rename a damaged file to a free name beside it."""
    for number in count(1):
        aside = path.with_name(f"{path.name}.damaged-{number}")
        if not aside.exists():
            break
    path.rename(aside)
    return aside
