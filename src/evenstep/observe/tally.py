"""The totals of a run, kept up record by record in constant memory, while it trains."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from msgspec import UnsetType

from evenstep.journal import Record
from evenstep.types import (
    AnyAction,
    Drain,
    Estimate,
    Joined,
    Launch,
    Left,
    Lost,
    Pause,
    Plan,
    Regroup,
    Resumed,
    StepDone,
    Steps,
    WorkerId,
)

MAX_DECISIONS = 8
NO_STEPS = Steps()


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """A run so far."""

    elapsed_s: float  # from the first record to the last
    trained_s: float  # of that, in steps
    num_steps: int
    samples: int
    part_of_limit: float  # the time that the limit needs, over the time it took; 0: unknown
    speedup: float  # the time that equal shares need, over the time it took; 0: unknown
    wait_fraction: float  # of the workers' time in steps, spent waiting for slower workers
    equal_wait_fraction: float  # the same with equal shares
    num_changes: int  # of the roster
    num_lost: int  # workers
    idle_s: float  # without training, because the roster changed
    longest_idle_s: float
    cost: float  # of all workers while they were in the roster
    is_priced: bool = False  # by their prices; else every worker-hour counts 1
    untold: Steps = NO_STEPS  # of these steps, those without a coordinator; their time is unknown

    @property
    def samples_per_s(self) -> float:
        """Throughput in steps: without evaluation, checkpoints and changes of the roster."""
        told = self.samples - self.untold.samples
        return told / self.trained_s if self.trained_s else 0.0


class RecordFacts(Protocol):
    """A record without its event."""

    @property
    def at_s(self) -> float: ...
    @property
    def actions(self) -> tuple[AnyAction, ...]: ...
    @property
    def estimate(self) -> Estimate | UnsetType: ...


class StepFacts(Protocol):
    """A step without its reports."""

    @property
    def seconds(self) -> float: ...
    @property
    def quiet(self) -> Steps: ...
    @property
    def earlier(self) -> Steps: ...
    @property
    def generation(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def idle_s(self) -> float: ...


class Tally:
    """Follows a run: `add` takes every record, as it is in the journal."""

    def __init__(self) -> None:
        self.decisions: deque[tuple[float, AnyAction]] = deque(maxlen=MAX_DECISIONS)  # since when
        self.estimate: Estimate | None = None  # the newest
        self._parts = 0.0, 0.0, 0.0, 0.0  # of the estimate, as weights of a step's seconds
        self.position = 0  # samples of the job consumed so far
        self._began_s: float | None = None
        self._last_s = self._trained_s = self._cost = self._price_per_s = 0.0
        self._prices: dict[WorkerId, float] = {}  # per hour, of the workers in the roster
        self._is_priced = False
        self._generation = 0
        self._num_steps = self._samples = self._num_lost = self._num_rosters = 0
        self._untold = Steps()
        self._idle_s = self._longest_idle_s = 0.0
        # Of steps with an estimate: their seconds, those of the limit and of equal shares, and the
        # seconds waited, as part of a worker.
        self._known_s = self._limit_s = self._equal_s = self._wait_s = self._equal_wait_s = 0.0

    def add(self, record: Record) -> None:
        """One more record."""
        event = record.event
        if isinstance(event, StepDone):
            samples = sum([report.samples for report in event.reports])
            self.add_steps(record, event, samples)
            return
        self._advance(record.at_s, record.actions)
        match event:
            case Resumed(generation=generation):
                self._generation = max(self._generation, generation)
            case Joined(workers=joined):
                self._prices |= {w.id: w.price_per_hour for w in joined}
                self._is_priced |= any(w.price_per_hour != 1.0 for w in joined)
                self._price_per_s = sum(self._prices.values()) / 3600.0
            case Left(workers=gone) | Lost(workers=gone):
                self._num_lost += len(gone) if isinstance(event, Lost) else 0
                for worker in gone:
                    self._prices.pop(worker, None)
                self._price_per_s = sum(self._prices.values()) / 3600.0

    def add_steps(self, record: RecordFacts, done: StepFacts, samples: int) -> None:
        """The record of a step whose workers had so many samples; its reports are not looked at."""
        self._advance(record.at_s, record.actions)
        quiet, earlier = done.quiet, done.earlier
        seconds = done.seconds + quiet.seconds
        self._num_steps += 1 + quiet.num + earlier.num
        self._samples += samples + quiet.samples
        self._trained_s += seconds + earlier.seconds
        self._idle_s += done.idle_s
        self._longest_idle_s = max(self._longest_idle_s, done.idle_s)
        self.position = max(self.position, done.position)
        if record.estimate:
            self.estimate, self._parts = record.estimate, _parts(record.estimate)
        if done.generation == self._generation and self.estimate is not None:
            limit, equal, wait, equal_wait = self._parts
            self._known_s += seconds
            self._limit_s += seconds * limit
            self._equal_s += seconds * equal
            self._wait_s += seconds * wait
            self._equal_wait_s += seconds * equal_wait

    def add_untold(self, steps: Steps) -> None:
        """Steps that were trained without a coordinator, known from a checkpoint."""
        self._untold += steps

    def _advance(self, at_s: float, actions: tuple[AnyAction, ...]) -> None:
        if self._began_s is None:
            self._began_s = self._last_s = at_s
        self._cost += self._price_per_s * max(0.0, at_s - self._last_s)
        self._last_s = max(self._last_s, at_s)
        for action in actions:
            if isinstance(action, Plan | Regroup | Launch | Drain | Pause):
                self.decisions.append((at_s, action))
            if isinstance(action, Regroup):
                self._num_rosters += 1
                self._generation = action.generation

    @property
    def totals(self) -> Totals:
        """The run up to the last record."""
        known_s, equal_s = self._known_s, self._equal_s
        return Totals(
            elapsed_s=self._last_s - (self._began_s or 0.0),
            trained_s=self._trained_s,
            num_steps=self._num_steps + self._untold.num,
            samples=self._samples + self._untold.samples,
            untold=self._untold,
            part_of_limit=self._limit_s / known_s if known_s else 0.0,
            speedup=equal_s / known_s if known_s else 0.0,
            wait_fraction=self._wait_s / known_s if known_s else 0.0,
            equal_wait_fraction=self._equal_wait_s / equal_s if equal_s else 0.0,
            num_changes=max(0, self._num_rosters - 1),
            num_lost=self._num_lost,
            idle_s=self._idle_s,
            longest_idle_s=self._longest_idle_s,
            cost=self._cost,
            is_priced=self._is_priced,
        )


def kind_of(action: AnyAction) -> str:
    """What people call it: plan, regroup, launch, drain, pause or stay."""
    return type(action).__name__.lower()


def _parts(now: Estimate) -> tuple[float, float, float, float]:
    """Seconds per second of training: what the limit would take, what equal shares would take, the
    mean wait of a worker, and its mean wait with equal shares."""
    return (
        now.part_of_limit,
        now.speedup,
        now.wait_fraction,
        now.speedup * now.equal_wait_fraction,
    )
