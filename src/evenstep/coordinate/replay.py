"""Recorded membership, handled again with the journal as its brain: are the effects the same?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from evenstep.config import Settings
from evenstep.coordinate.events import AnyEffect, Opened
from evenstep.coordinate.membership import membership
from evenstep.coordinate.record import MembershipRecord, recorded
from evenstep.coordinate.state import RunState
from evenstep.decide.cluster import Cluster
from evenstep.engine import Engine
from evenstep.journal import Record
from evenstep.types import AnyAction, AnyEvent, StepDone


class DivergedError(Exception):
    """The record and the journal do not tell of the same run."""


class RecordedBrain:
    """Decides again on the events of a journal, as membership asks for them.

    Which steps the brain was asked about depended on its pace; the journal knows.
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
    return isinstance(event, StepDone) and (recorded.at_s, event.generation, event.step) == (
        now_s,
        done.generation,
        done.step,
    )
