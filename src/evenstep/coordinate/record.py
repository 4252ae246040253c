"""The membership record, beside the journal: the inputs that mattered, with their effects.

Heartbeats, ticks and reported steps that change nothing but a worker's contact or the status are
not written. Only a tick or a complaint looks at contacts: its line carries those that have changed
unseen, once for each worker however many heartbeats there were.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO

import msgspec

from evenstep import __version__
from evenstep.coordinate.events import AnyEffect, AnyInput, Heard, Reply, Send, Tick
from evenstep.coordinate.state import MINOR, Contact, RunState, Timing
from evenstep.errors import InvalidInputError, JournalError
from evenstep.messages import Lease, Stepped, Stuck
from evenstep.types import WorkerId
from evenstep.wire import MAX_BYTES, Codec

log = logging.getLogger("evenstep")

RECORD_FORMAT = 1
_major = attrgetter(*(name for name in RunState.__struct_fields__ if name not in MINOR))


class RecordHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line."""

    format: int = RECORD_FORMAT
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
        self._path = path
        self._file: BinaryIO | None = None
        self._known: dict[WorkerId, Contact] = {}  # contacts that a replay has right by now
        try:
            self._file = path.open("ab", buffering=0)
            self._file.truncate(path.read_bytes().rfind(b"\n") + 1)  # a torn last line
            if path.stat().st_size == 0:
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
        # Without effects and changes, nothing later can depend on this input.
        if self._file is None or (after and quiet and _major(before) == _major(after)):
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
        if self._file is not None:
            self._file.close()
        self._file = None

    def _append(self, line: bytes) -> None:
        assert self._file is not None
        if self._file.write(line) < len(line):
            raise OSError(errno.ENOSPC, "the disk is full")

    def _give_up(self, error: Exception) -> None:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        log.error(
            "%s: cannot be written: %s; the run goes on, but its membership is not recorded",
            *(self._path, problem),
        )
        self.close()


def read_record(path: Path) -> Iterator[MembershipRecord]:
    """The records of a file. A last line that broke off is left out."""
    try:
        file = path.open("rb")
    except OSError as e:
        raise JournalError(str(path), 0, f"cannot be read: {e.strerror}") from None
    with file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_BYTES + 1), b""), start=1):
            if not line.endswith(b"\n"):
                return
            try:
                if number > 1:
                    yield _records.decode(line)
                elif (version := _headers.decode(line).format) != RECORD_FORMAT:
                    problem = f"is of format {version}; this evenstep reads {RECORD_FORMAT}"
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
