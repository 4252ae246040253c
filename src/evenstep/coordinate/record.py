"""The membership record, beside the journal: the inputs that mattered, with their effects.

Heartbeats, ticks and reported steps that change nothing but a worker's contact or the status are
not written. The line of a tick, a complaint, or a tested or lost connection also carries the
contacts that changed since the last such line, once for each worker. A replay handles the inputs
again, with the journal as its brain, and compares the effects.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from evenstep import __version__
from evenstep.config import Settings
from evenstep.coordinate.events import (
    AnyEffect,
    AnyInput,
    Disconnected,
    Heard,
    Opened,
    Reply,
    Send,
    Tick,
)
from evenstep.coordinate.membership import membership
from evenstep.coordinate.state import MINOR, Contact, RunState, Timing
from evenstep.decide.cluster import Cluster
from evenstep.engine import Engine
from evenstep.errors import InvalidInputError, JournalError
from evenstep.journal import Record
from evenstep.lines import LineFile
from evenstep.messages import Began, Done, Lease, Listening, Reached, Stepped, Stuck
from evenstep.types import AnyAction, AnyEvent, StepDone, WorkerId
from evenstep.wire import MAX_BYTES, Codec

log = logging.getLogger("evenstep")

RECORD_FORMAT = 1
LOOKING = Stuck | Listening | Reached | Began | Stepped | Done
"""Messages whose handling depends on times and on steps that were reported before."""

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


_headers: Codec[RecordHeader] = Codec(RecordHeader, checksum=True)
_records: Codec[MembershipRecord] = Codec(MembershipRecord, checksum=True)


class MembershipRecorder:
    """Appends to the record of a run. While that is not possible, records wait in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: LineFile | None = None
        self._known: dict[WorkerId, Contact] = {}  # contacts as a replay would know them by now
        try:
            self._lines = LineFile(path, os.O_CREAT)
            if self._lines.is_empty:
                self._lines.append(_headers.encode(RecordHeader()))
        except OSError as e:
            self._give_up(e)

    @property
    def problem(self) -> str:
        """Why records are still unwritten; empty if none are."""
        return self._lines.problem if self._lines is not None else ""

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
        if self._lines is None or (after and quiet and _major(before) == _major(after)):
            return
        reads = isinstance(event, Tick | Disconnected) or (
            isinstance(event, Heard) and isinstance(event.message, LOOKING)
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
            self._lines.append(_records.encode(record), droppable=True)
        except InvalidInputError as e:
            self._give_up(e)

    def flush(self) -> None:
        """Write the records that wait, if that is possible by now."""
        if self._lines is not None:
            self._lines.flush()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
        self._lines = None

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
            yield replace(record, effects=effects)


def _concerns(thing: AnyInput | AnyEffect, worker: WorkerId) -> bool:
    about = thing.message if isinstance(thing, Reply) else thing
    return worker in (getattr(about, "worker", ""), *getattr(about, "workers", ()))


# Handled again, with the journal as the brain.


class DivergedError(Exception):
    """The record and the journal are not of the same run."""


class RecordedBrain:
    """Decides again on the events of a journal, as membership asks for them.

    The journal tells which steps the brain was consulted on.
    """

    def __init__(self, settings: Settings | None = None, records: Iterable[Record] = ()) -> None:
        self._settings = settings  # None: the run has no journal
        self._engine = Engine(settings) if settings is not None else None
        self._records = iter(records)
        self._next = next(self._records, None)
        self.num_decided = 0

    @property
    def cluster(self) -> Cluster:
        return self._begun.cluster

    @property
    def _begun(self) -> Engine:
        if self._engine is None:
            raise DivergedError("the run began, and there is no journal of it")
        return self._engine

    def begin(self, settings: Settings, facts: dict[str, Any]) -> None:
        if settings != self._settings:
            raise DivergedError("the settings of the first ready worker are not the journal's")

    def forward(self, num_decided: int, *, steps_only: bool) -> None:
        """Decide on events that the record leaves out: steps of no consequence to membership."""
        while self.num_decided < num_decided and self._next is not None:
            event = self._next.event
            if steps_only and not isinstance(event, StepDone):
                raise DivergedError(
                    f"journal record {self.num_decided + 1}, {type(event).__name__}, has no cause "
                    "in the membership record"
                )
            self._begun.handle(self._next.at_s, event)
            self._take()

    def decide(self, now_s: float, event: AnyEvent) -> tuple[AnyAction, ...]:
        recorded = self._next
        if isinstance(event, StepDone):
            if recorded is None or not _is_same_step(recorded, now_s, event):
                return ()  # the brain was not asked
            self._take()
            return self._begun.handle(now_s, recorded.event)
        while recorded is not None and isinstance(recorded.event, StepDone):
            self._begun.handle(recorded.at_s, recorded.event)  # the last one, as training ends
            self._take()
            recorded = self._next
        actions = self._begun.handle(now_s, event)
        if recorded is not None:
            if (recorded.at_s, recorded.event) != (now_s, event):
                raise DivergedError(
                    f"journal record {self.num_decided + 1} is {recorded.event} at "
                    f"{recorded.at_s:.3f} s; membership now asks about {event} at {now_s:.3f} s"
                )
            self._take()
        return actions

    def _take(self) -> None:
        self._next = next(self._records, None)
        self.num_decided += 1


def replay_membership(
    records: Iterable[MembershipRecord], brain: RecordedBrain
) -> Iterator[tuple[MembershipRecord, tuple[AnyEffect, ...]]]:
    """Each record, and the effects of its input now. DivergedError: the brain was asked otherwise.

    An input that crashed the coordinator has no effects.
    """
    state = RunState()
    effects: tuple[AnyEffect, ...]
    for record in records:
        brain.forward(record.num_decided, steps_only=not isinstance(record.event, Opened))
        timing = record.timing or replace(state.timing, clock_read_s=record.clock_read_s)
        state = replace(
            state,
            cluster=brain.cluster if state.cluster is not None else None,
            contacts={**state.contacts, **record.contacts},
            timing=timing,
        )
        try:
            state, effects = membership(state, record.event, record.at_s, brain)
        except DivergedError:
            raise
        except Exception:
            effects = ()
        yield record, recorded(effects)


def _is_same_step(recorded: Record, now_s: float, done: StepDone) -> bool:
    event = recorded.event
    if not isinstance(event, StepDone):
        return False
    step = (recorded.at_s, event.generation, event.step)
    return step == (now_s, done.generation, done.step)
