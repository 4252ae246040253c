"""The search for the cluster size: throughput per size in, the next size and the reason out.

The rules are those of the published autoscaling engine (Or, Zhang and Freedman, MLSys 2020). Its
sizes are all multiples of the step; for the cases that it leaves open we chose:

- A move beyond `min` or `max` stops at the bound; the shorter pair is judged like any other.
- A size with fewer than `period_steps` steps is not a data point yet. Nor is one closer than
  `step_workers` to a size with more data, unless it is a bound: the effect of a single worker is
  lost in the noise of ten steps.
- While workers are joining or leaving, only steps of usual throughput count: a process starting up
  on the same host slows the others down.
- The throughput of a size is all its samples over all its seconds. (The published engine averages
  over steps; then the result would depend on how steps are grouped into reports.)
- "The lowest `passes` pairs all pass" needs that many pairs; with fewer, the search tries smaller.
- The search settles once the chosen size itself has `settle_steps` of data. Its record is frozen
  from then on, as the reference for a shift in throughput.
- A shift is permanent once `LASTING_LOOKS` consecutive looks over `LASTING_S` seconds have seen it.
  All records are then outdated: they are dropped and the search restarts at the current size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from evenstep.config import ScalingSettings, WorkerSettings
from evenstep.ports import ScalingHeuristic

LASTING_LOOKS = 3
LASTING_S = 30.0  # three looks alone pass too quickly if steps are short
USUAL = 0.05  # relative deviation within which a step has the usual throughput of its size


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Measurements of one cluster size over `num_steps` steps; `batch` is that of the last."""

    num_workers: int
    samples: int
    seconds: float
    price_per_s: float  # of all workers together, averaged over time
    batch: int
    num_steps: int = 1

    @property
    def samples_per_s(self) -> float:
        """Throughput of the whole cluster."""
        return self.samples / self.seconds

    def plus(self, step: Size) -> Size:
        """This record extended by one or more steps."""
        seconds = self.seconds + step.seconds
        paid = self.price_per_s * self.seconds + step.price_per_s * step.seconds
        return replace(
            step,
            samples=self.samples + step.samples,
            seconds=seconds,
            price_per_s=paid / seconds,
            num_steps=self.num_steps + step.num_steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """Progress of the job, for heuristics that look ahead."""

    elapsed_s: float
    samples_left: int
    initial_samples_per_s: float
    initial_total_s: float  # expected duration at the first size


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The state of the search. `Search()` is that of a job that has not started."""

    num_workers: int = 0
    sizes: tuple[Size, ...] = ()  # by number of workers
    recent: Size | None = None  # steps since the last look or transition
    is_first_step: bool = True  # the next step is the first after a transition
    is_settled: bool = False
    num_shifted_looks: int = 0  # consecutive looks with a shifted throughput
    shifted: Size | None = None  # the steps of those looks
    num_failures: int = 0  # consecutive failed launches
    num_backoff_looks: int = 0  # looks left in which no worker is launched
    elapsed_s: float = 0.0  # time spent in steps
    initial_samples_per_s: float = 0.0
    initial_total_s: float = 0.0


def observe(memory: Search, step: Size, *, waiting: bool = False) -> Search:
    """Learn from one step, or from several reported together.

    Some count as time but not as throughput: the first step after a transition (with those reported
    along with it), and unusual steps while `waiting` for workers to join or leave.
    """
    if step.num_workers != memory.num_workers:
        memory = transition(memory, step.num_workers)
    memory = replace(memory, elapsed_s=memory.elapsed_s + step.seconds)
    if memory.is_first_step or (waiting and not _is_usual(memory.sizes, step)):
        return replace(memory, is_first_step=False)
    return replace(
        memory,
        sizes=memory.sizes if memory.is_settled else _recorded(memory.sizes, step),
        recent=memory.recent.plus(step) if memory.recent else step,
    )


def transition(memory: Search, num_workers: int) -> Search:
    """The roster changed, perhaps at the same size. Records of sizes are kept."""
    return replace(
        memory,
        num_workers=num_workers,
        recent=None,
        is_first_step=True,
        is_settled=False,
        num_shifted_looks=0,
        shifted=None,
    )


def look(
    memory: Search,
    settings: ScalingSettings,
    workers: WorkerSettings,
    heuristic: ScalingHeuristic,
    *,
    samples_left: int,
    waiting: bool,
) -> tuple[Search, int | None, str]:
    """The size to move to, or None to stay, and why; the reason is empty if no look was due."""
    if waiting or memory.recent is None or memory.recent.num_steps < settings.period_steps:
        return memory, None, ""
    memory, shift = _check_shift(memory, settings)
    memory = _with_start(memory, samples_left)
    points = _data_points(memory, settings, workers)
    job = JobProgress(
        elapsed_s=memory.elapsed_s,
        samples_left=samples_left,
        initial_samples_per_s=memory.initial_samples_per_s,
        initial_total_s=memory.initial_total_s,
    )
    verdicts = [heuristic.worth(a, b, job) for a, b in pairwise(points)]
    target, why = _choose(points, verdicts, settings, workers)
    target = max(workers.min, min(target, workers.max))
    if target > memory.num_workers and memory.num_backoff_looks > 0:
        target, backoff = memory.num_workers, memory.num_backoff_looks - 1
        why = f"{why} more, but the last launch failed; next try in {backoff} looks; stay at"
        memory = replace(memory, num_backoff_looks=backoff)
    current = next(s for s in memory.sizes if s.num_workers == memory.num_workers)
    stays = target == memory.num_workers
    memory = replace(
        memory, recent=None, is_settled=stays and current.num_steps >= settings.settle_steps
    )
    return memory, None if stays else target, f"{shift}{why} {target}"


def _data_points(
    memory: Search, settings: ScalingSettings, workers: WorkerSettings
) -> tuple[Size, ...]:
    """The sizes to compare: with enough data, and not too close to one with more data."""
    known = [s for s in memory.sizes if s.num_steps >= settings.period_steps]
    points = [s for s in known if s.num_workers in (workers.min, workers.max)]
    between: list[int] = []
    current = memory.num_workers
    for size in sorted(known, key=lambda s: (-s.num_steps, s.num_workers != current)):
        near = any(abs(size.num_workers - n) < settings.step_workers for n in between)
        if size not in points and not near:
            points.append(size)
            between.append(size.num_workers)
    return tuple(sorted(points, key=lambda s: s.num_workers))


def _choose(
    points: tuple[Size, ...],
    verdicts: list[tuple[bool, str]],
    settings: ScalingSettings,
    workers: WorkerSettings,
) -> tuple[int, str]:
    """The size to move to, before clamping, and why; the caller appends the clamped size."""
    low, high, step = points[0].num_workers, points[-1].num_workers, settings.step_workers
    if not verdicts:
        if workers.min == workers.max:
            return low, "minimum and maximum are equal; stay at"
        target = high + step if high < workers.max else low - step
        return target, f"only {low} workers measured; try"

    passed = [p for p, _ in verdicts]
    # The first pair that fails decides, else the last pair.
    at = passed.index(False) if False in passed else len(passed) - 1
    smaller, larger = points[at], points[at + 1]
    why = f"{smaller.num_workers} -> {larger.num_workers} workers: {verdicts[at][1]}"
    if all(passed) and high < workers.max:
        return high + step, f"{why}; try"
    if passed[: settings.passes] != [True] * settings.passes and low > workers.min:
        return low - step, f"{why}; the lowest {settings.passes} pairs do not all pass; try"
    if all(passed):
        return high, f"{why}; {workers.max} is the maximum; settle at"
    if larger.num_steps < settings.settle_steps:
        return larger.num_workers, (
            f"{why}; {larger.num_workers} workers have {larger.num_steps} of "
            f"{settings.settle_steps} steps; measure more at"
        )
    return smaller.num_workers, f"{why}; settle at"


def _check_shift(memory: Search, settings: ScalingSettings) -> tuple[Search, str]:
    """Once settled: restart the search if the throughput has shifted permanently."""
    if not memory.is_settled or memory.recent is None:
        return memory, ""
    old = next(s for s in memory.sizes if s.num_workers == memory.num_workers).samples_per_s
    now = memory.recent.samples_per_s
    if abs(now / old - 1) <= settings.look_again:
        return replace(memory, num_shifted_looks=0, shifted=None), ""
    looks = memory.num_shifted_looks + 1
    shifted = memory.shifted.plus(memory.recent) if memory.shifted else memory.recent
    if looks < LASTING_LOOKS or shifted.seconds < LASTING_S:
        return replace(memory, num_shifted_looks=looks, shifted=shifted), ""
    now = shifted.samples_per_s
    memory = replace(memory, sizes=(shifted,), is_settled=False, num_shifted_looks=0, shifted=None)
    return memory, (
        f"{memory.num_workers} workers went from {old:.4g} to {now:.4g} samples/s "
        f"({now / old - 1:+.0%}) for {looks} looks; restart the search: "
    )


def _with_start(memory: Search, samples_left: int) -> Search:
    """At the first look of a job: record its expected duration at the initial size."""
    if memory.initial_samples_per_s > 0 or memory.recent is None:
        return memory
    speed = memory.recent.samples_per_s
    return replace(
        memory,
        initial_samples_per_s=speed,
        initial_total_s=memory.elapsed_s + samples_left / speed,
    )


def _is_usual(sizes: tuple[Size, ...], step: Size) -> bool:
    known = [s.samples_per_s for s in sizes if s.num_workers == step.num_workers]
    return bool(known) and abs(step.samples_per_s / known[0] - 1) <= USUAL


def _recorded(sizes: tuple[Size, ...], step: Size) -> tuple[Size, ...]:
    known = {s.num_workers: s for s in sizes}
    so_far = known.get(step.num_workers)
    known[step.num_workers] = so_far.plus(step) if so_far else step
    return tuple(known[n] for n in sorted(known))
