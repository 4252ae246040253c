"""The membership record, beside the journal: the inputs that mattered, with their effects.

Heartbeats, ticks and reported steps that change nothing but a worker's contact or the status are
not written. Only a tick or a complaint looks at contacts: its line carries those that have changed
unseen, once for each worker however many heartbeats there were.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import msgspec

from evenstep import __version__
from evenstep.coordinate.events import AnyEffect, AnyInput, Heard, Reply, Send, Tick
from evenstep.coordinate.state import MINOR, Contact, RunState, Timing
from evenstep.errors import InvalidInputError, JournalError
from evenstep.messages import Lease, Stepped, Stuck
from evenstep.types import WorkerId
from evenstep.wire import MAX_BYTES, Codec

log = logging.getLogger("evenstep")

FORMAT = 1
_MAJOR = tuple(f.name for f in fields(RunState) if f.name not in MINOR)


class RecordHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line."""

    format: int = FORMAT
    evenstep: str = __version__


class MembershipRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One input, what it needs to be handled again, and its effects."""

    at_s: float = msgspec.field(name="at")  # on the run's own clock
    num_decided: int = msgspec.field(name="decided", default=0)  # journal records before it
    clock_read_s: float | None = msgspec.field(name="read", default=None)  # before it
    timing: Timing | None = None
    contacts: dict[WorkerId, Contact] = {}  # changed since the record before
    event: AnyInput
    effects: tuple[AnyEffect, ...] = ()


_headers: Codec[RecordHeader] = Codec(RecordHeader)
_records: Codec[MembershipRecord] = Codec(MembershipRecord)


class MembershipRecorder:
    """Appends to the record of a run. If that fails, the run goes on without it."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, -1
        self._known: dict[WorkerId, Contact] = {}  # contacts that a replay has right by now
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._file, _end_of_last_line(self._file))
            if os.fstat(self._file).st_size == 0:
                self._append(_headers.encode(RecordHeader()))
        except OSError as e:
            self._give_up(e)

    def write(
        self,
        at_s: float,
        event: AnyInput,
        before: RunState,
        after: RunState | None,
        effects: tuple[AnyEffect, ...],
        decided: range,
    ) -> None:
        """Record an input if it mattered; `after` is None if handling it failed.

        `decided` are the numbers of the journal records that it caused.
        """
        effects = recorded(effects)
        reported = isinstance(event, Heard) and isinstance(event.message, Stepped)
        quiet = not effects and (reported or not decided)
        if self._file < 0 or (after is not None and quiet and _is_minor(before, after)):
            return
        reads = isinstance(event, Tick) or (
            isinstance(event, Heard) and isinstance(event.message, Stuck)
        )
        unknown = {w: c for w, c in before.contacts.items() if self._known.get(w) is not c}
        record = MembershipRecord(
            at_s=at_s,
            num_decided=decided.start,
            clock_read_s=before.timing.clock_read_s,
            timing=before.timing if reads else None,
            contacts=unknown if reads else {},
            event=event,
            effects=effects,
        )
        if after is not None:
            stale = {} if reads else unknown
            self._known = {w: c for w, c in after.contacts.items() if w not in stale}
        try:
            self._append(_records.encode(record))
        except (OSError, InvalidInputError) as e:
            self._give_up(e)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _append(self, line: bytes) -> None:
        size = os.fstat(self._file).st_size
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, size)
            raise OSError(None, "the disk is full")

    def _give_up(self, error: Exception) -> None:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        log.error(
            "%s: cannot be written: %s; the run goes on, but its membership is not recorded",
            *(self._path, problem),
        )
        self.close()


def read_record(path: Path) -> Iterator[MembershipRecord]:
    """The records of a file. A last line that broke off is left out."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_BYTES + 1), b""), start=1):
            if not line.endswith(b"\n"):
                return
            try:
                if number > 1:
                    yield _records.decode(line)
                elif (version := _headers.decode(line).format) != FORMAT:
                    problem = f"is of format {version}; this evenstep reads {FORMAT}"
                    raise JournalError(str(path), 1, problem)
            except InvalidInputError as e:
                raise JournalError(str(path), number, e.problem) from None


def recorded(effects: tuple[AnyEffect, ...]) -> tuple[AnyEffect, ...]:
    """The effects worth recording: not the answers to heartbeats."""
    return tuple(e for e in effects if not (isinstance(e, Send) and isinstance(e.message, Lease)))


def story(records: Iterable[MembershipRecord], worker: WorkerId) -> Iterator[MembershipRecord]:
    """A worker's own inputs, and the effects of others' inputs on it."""
    for record in records:
        effects = tuple(effect for effect in record.effects if _concerns(effect, worker))
        if effects or _concerns(record.event, worker):
            yield msgspec.structs.replace(record, effects=effects)


def _concerns(thing: AnyInput | AnyEffect, worker: WorkerId) -> bool:
    about = thing.message if isinstance(thing, Reply) else thing
    return worker in (getattr(about, "worker", ""), *getattr(about, "workers", ()))


def _is_minor(before: RunState, after: RunState) -> bool:
    """Whether nothing changed that the outcome of a later input can depend on."""
    pairs = ((getattr(before, name), getattr(after, name)) for name in _MAJOR)
    return all(a is b or a == b for a, b in pairs)


def _end_of_last_line(file: int) -> int:
    """How many bytes of the file are whole lines."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - 2**16)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
