"""The nouns: events (what happened), actions (what to do), and what a policy sees.

Events and actions are frozen, keyword-only, validated on construction, and written to the journal
unchanged. `Fleet` and `Outcome` hold the same facts as columns, in the order of worker ids, for
vectorised arithmetic over a thousand workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenstep.errors import InvalidInputError

WorkerId = str
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MOST_SAMPLES = 2**53
"""Largest batch: up to it a float counts samples exactly."""

SHORTEST_S, LONGEST_S = 1e-9, 1e9
"""Step times are clamped to this range."""


def listed(workers: Sequence[WorkerId]) -> str:
    """Up to four names, or else their number."""
    return ", ".join(workers) if len(workers) <= 4 else f"{len(workers)} workers"


def counted(num_workers: int) -> str:
    """1 worker, 2 workers."""
    return "1 worker" if num_workers == 1 else f"{num_workers} workers"


class Worker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's description, known before it has trained."""

    id: WorkerId
    kind: str = "cpu"  # workers of one kind are expected to be equally fast
    cores: float = 1.0
    flops: float | None = None  # half precision; for fleets of different devices
    cap: int | None = None  # the largest share that fits its memory
    price_per_hour: float = 1.0
    warmup_samples_per_s: float | None = None  # measured alone, before joining

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise InvalidInputError("worker.id", f"must be a name, got {self.id!r}")
        for name in ("cores", "flops", "warmup_samples_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise InvalidInputError(
                    f"worker {self.id}: {name}", f"must be above 0, got {value}"
                )
        if not 0 <= self.price_per_hour < inf:
            raise InvalidInputError(
                f"worker {self.id}: price_per_hour", f"must not be negative: {self.price_per_hour}"
            )
        if self.cap is not None and self.cap < 1:
            raise InvalidInputError(
                f"worker {self.id}: cap",
                f"must be 1 or more, got {self.cap}; omit it for no cap",
            )


class StepReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one worker measured in one step. Encoded as an array, to keep journals small."""

    worker: WorkerId
    samples: int
    compute_s: float  # forward and backward, excluding waits for other workers
    wait_s: float = 0.0
    free_cpu: float = 1.0  # of this worker's cores, 0 to 1, as the next step begins
    free_memory: float = 1.0  # of its memory, 0 to 1, as the next step begins
    grad_squared_norm: float = 0.0  # of its own mean gradient, before reduction; 0: not measured
    spread_s: float = 0.0  # standard deviation, if compute_s is the mean of several steps

    def __post_init__(self) -> None:
        # One condition for the valid case: a thousand workers make a thousand reports a step.
        if not (
            0 <= self.samples <= MOST_SAMPLES
            and 0 <= self.compute_s < inf
            and 0 <= self.wait_s < inf
            and 0 <= self.free_cpu <= 1
            and 0 <= self.free_memory <= 1
            and self.grad_squared_norm >= 0
            and 0 <= self.spread_s < inf
            and (self.compute_s > 0 or self.samples == 0)
        ):
            self._raise_invalid()

    def _raise_invalid(self) -> None:
        of = f"report of {self.worker}"
        if not 0 <= self.samples <= MOST_SAMPLES:
            raise InvalidInputError(f"{of}: samples", f"out of range: {self.samples}")
        for name in ("free_cpu", "free_memory"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise InvalidInputError(f"{of}: {name}", f"must lie in [0, 1], got {value}")
        for name in ("compute_s", "wait_s", "grad_squared_norm", "spread_s"):
            value = getattr(self, name)
            if not 0 <= value < inf:
                raise InvalidInputError(
                    f"{of}: {name}", f"must be 0 or more and finite, got {value}"
                )
        raise InvalidInputError(f"{of}: compute_s", f"is 0 for {self.samples} samples")


def _at_least_one(event: str, num_workers: int) -> None:
    if num_workers < 1:
        raise InvalidInputError(f"{event}: num_workers", f"must be 1 or more, got {num_workers}")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Something that happened. The brain gets no other input."""


class Joined(Event, frozen=True, kw_only=True):
    """Workers have started and are ready for a share."""

    workers: tuple[Worker, ...]


class Left(Event, frozen=True, kw_only=True):
    """Workers announced their departure, or were drained, at the end of a step."""

    workers: tuple[WorkerId, ...]
    cause: str = ""


class Lost(Event, frozen=True, kw_only=True):
    """Workers died, hung or were disconnected."""

    workers: tuple[WorkerId, ...]
    cause: str = ""


class LaunchFailed(Event, frozen=True, kw_only=True):
    """The launcher could not start workers."""

    num_workers: int
    kind: str = ""
    cause: str = ""

    def __post_init__(self) -> None:
        _at_least_one("launch failed", self.num_workers)


class SizeAsked(Event, frozen=True, kw_only=True):
    """An operator requests this many workers."""

    num_workers: int

    def __post_init__(self) -> None:
        _at_least_one("size asked", self.num_workers)


class DrainAsked(Event, frozen=True, kw_only=True):
    """An operator requests that a worker leave."""

    worker: WorkerId


class Resumed(Event, frozen=True, kw_only=True):
    """The run goes on after records were lost; up to `generation`, numbers may have been used."""

    generation: int


class Steps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Totals over several steps."""

    num: int = 0
    seconds: float = 0.0
    samples: int = 0

    def __post_init__(self) -> None:
        if self.num < 0 or self.samples < 0 or not 0 <= self.seconds < inf:
            totals = f"{self.num} steps, {self.samples} samples, {self.seconds} s"
            raise InvalidInputError("steps", f"must not be negative or infinite: {totals}")

    def __add__(self, other: Steps) -> Steps:
        return Steps(
            num=self.num + other.num,
            seconds=self.seconds + other.seconds,
            samples=self.samples + other.samples,
        )


class StepDone(Event, frozen=True, kw_only=True):
    """The cluster committed a step: all of its reports, and forecasts for the next step.

    `forecasts` are samples per second in the order of `reports`, None for a worker without one; the
    engine adds them before it decides on and records the event, so a replay needs no forecaster.
    """

    step: int
    generation: int
    seconds: float  # from the step's start to its commit
    reports: tuple[StepReport, ...]
    forecasts: tuple[float | None, ...] | None = None
    grad_squared_norm: float = 0.0  # of the reduced gradient; 0: not measured
    quiet: Steps = Steps()  # earlier steps of this generation that were not reported one by one
    earlier: Steps = Steps()  # likewise of generations before; their samples are in `quiet`, too
    position: int = 0  # samples of the job consumed so far; 0: unknown
    idle_s: float = 0.0  # before it, without training because the roster changed

    def __post_init__(self) -> None:
        if not 0 < self.seconds < inf:
            raise InvalidInputError(
                f"step {self.step}: seconds", f"must be above 0: {self.seconds}"
            )
        if not 0 <= self.idle_s < inf:
            raise InvalidInputError(
                f"step {self.step}: idle_s", f"must be 0 or more and finite, got {self.idle_s}"
            )
        if len({r.worker for r in self.reports}) < len(self.reports):
            raise InvalidInputError(f"step {self.step}: reports", "a worker has two reports")
        if self.forecasts is not None and len(self.forecasts) != len(self.reports):
            raise InvalidInputError(
                f"step {self.step}: forecasts",
                f"{len(self.forecasts)} for {len(self.reports)} reports; give one per report",
            )

    @property
    def steps(self) -> Steps:
        """This step and the quiet ones before it."""
        samples = sum(r.samples for r in self.reports)
        return Steps(num=1, seconds=self.seconds, samples=samples) + self.quiet


class Estimate(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A measured throughput beside what other shares would give, in samples per second.

    Made now and then for people; no decision depends on it.
    """

    measured: float
    equal: float  # the same share for every worker
    limit: float  # the best shares
    wait_fraction: float  # of the workers' time in steps, spent waiting for slower workers
    equal_wait_fraction: float

    def __post_init__(self) -> None:
        for name in ("measured", "equal", "limit"):
            value = getattr(self, name)
            if not 0 < value < inf:
                raise InvalidInputError(f"estimate: {name}", f"must be above 0, got {value}")
        for name in ("wait_fraction", "equal_wait_fraction"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise InvalidInputError(f"estimate: {name}", f"must lie in [0, 1], got {value}")

    @property
    def part_of_limit(self) -> float:
        """1: no shares would be faster."""
        return self.measured / self.limit

    @property
    def speedup(self) -> float:
        """Over equal shares."""
        return self.measured / self.equal


AnyEvent = Joined | Left | Lost | LaunchFailed | SizeAsked | DrainAsked | Resumed | StepDone


class Action(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A decision of the brain, with the reason for it."""

    reason: str


class Regroup(Action, frozen=True, kw_only=True):
    """A new generation: these workers, in rank order."""

    generation: int
    roster: tuple[WorkerId, ...]


class Plan(Action, frozen=True, kw_only=True):
    """The shares of all workers of a generation, valid from `from_step` on."""

    generation: int
    from_step: int
    shares: dict[WorkerId, int]
    lr_factor: float = 1.0  # relative to the learning rate for the base batch

    @property
    def batch(self) -> int:
        """The global batch: the sum of the shares."""
        return sum(self.shares.values())


class Launch(Action, frozen=True, kw_only=True):
    """Start workers; each answers with a `Joined` event."""

    num_workers: int
    kind: str = ""  # empty: any kind


class Drain(Action, frozen=True, kw_only=True):
    """Ask a worker to leave at the end of a step."""

    worker: WorkerId
    may_stay: bool = False  # as a warm spare: the worker itself is fine


class Pause(Action, frozen=True, kw_only=True):
    """Stop stepping and keep the state until the next plan."""


class Stay(Action, frozen=True, kw_only=True):
    """The cluster stays as it is; recorded for the reason."""


AnyAction = Regroup | Plan | Launch | Drain | Pause | Stay


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fleet:
    """The workers that share a batch, as columns in the order of their ids.

    Ties are broken by id, not by rank or arrival: equal inputs give equal plans on every machine.
    """

    ids: tuple[WorkerId, ...]
    kinds: tuple[str, ...]
    cores: FloatArray
    flops: FloatArray  # nan: unknown
    warmup_samples_per_s: FloatArray  # nan: unknown
    lower: IntArray  # bounds of a share
    upper: IntArray

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, workers: Iterable[Worker], *, batch: int, min_share: int = 0) -> Fleet:
        """Columns of `workers`, each share bounded by `min_share` and the worker's cap."""
        rows = sorted(workers, key=lambda w: w.id)
        nan = float("nan")
        return cls(
            ids=tuple(w.id for w in rows),
            kinds=tuple(w.kind for w in rows),
            cores=np.array([w.cores for w in rows], dtype=np.float64),
            flops=np.array([w.flops or nan for w in rows], dtype=np.float64),
            warmup_samples_per_s=np.array(
                [w.warmup_samples_per_s or nan for w in rows], dtype=np.float64
            ),
            lower=np.array([min(min_share, w.cap or batch) for w in rows], dtype=np.int64),
            upper=np.array([min(w.cap or batch, batch) for w in rows], dtype=np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The measurements of one step, in a fleet's order. NaN: none for that worker."""

    step: int
    samples: IntArray
    compute_s: FloatArray
    forecast_samples_per_s: FloatArray
    spread_s: FloatArray | float = 0.0  # standard deviation, if compute_s is a mean

    @classmethod
    def of(cls, event: StepDone, fleet: Fleet) -> Outcome:
        """The columns of `event` for `fleet`; reports of workers outside it are dropped."""
        row = {r.worker: i for i, r in enumerate(event.reports)}
        at = np.array([row.get(w, -1) for w in fleet.ids], dtype=np.int64)
        # The last row is blank: index -1, a worker without a report, selects it.
        samples = np.array([r.samples for r in event.reports] + [0], dtype=np.int64)[at]
        compute_s = np.array([r.compute_s for r in event.reports] + [np.nan])[at]
        spread_s = np.array([r.spread_s for r in event.reports] + [0.0])[at]
        forecasts = event.forecasts or (None,) * len(event.reports)
        forecast = np.array([np.nan if f is None else f for f in (*forecasts, None)])[at]
        # Clamped so that ratios of times can be squared and summed without overflow.
        compute_s = np.clip(compute_s, SHORTEST_S, LONGEST_S)
        forecast = np.clip(np.where(forecast > 0, forecast, np.nan), SHORTEST_S, 1 / SHORTEST_S**2)
        return cls(
            step=event.step,
            samples=samples,
            compute_s=np.where(samples > 0, compute_s, np.nan),
            forecast_samples_per_s=forecast,
            spread_s=np.minimum(spread_s, compute_s),
        )
