"""The search for the size of the cluster: throughput per size in, the next size and why out.

The rules are those of the published autoscaling engine (Or, Zhang and Freedman, MLSys 2020). Where
it is silent, because its sizes are all multiples of the step, we read it so:

- A step that would pass `min` or `max` stops there; the shorter pair is judged like any other.
- A size seen in passing, for fewer than `period_steps` steps, is no data point yet.
- "The lowest `passes` pairs all pass" needs that many pairs: with fewer the search looks down.
- The search has settled once the size it chose has `settle_steps` of data itself. From then on its
  record stands still, as the yardstick for a shift in throughput.
- A shift for good is one that `LASTING_LOOKS` looks in a row have seen. All records are then from
  another time: they are dropped, and the search begins again from the size it is at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from evenstep.config import ScalingSettings, WorkerSettings
from evenstep.ports import ScalingHeuristic

LASTING_LOOKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is known of one size of the cluster: means over `num_steps` steps, the last batch."""

    num_workers: int
    samples_per_s: float
    price_per_s: float  # of all its workers together
    batch: int
    num_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """How far the job is, for heuristics that look ahead."""

    elapsed_s: float
    samples_left: int
    initial_samples_per_s: float
    initial_total_s: float  # expected at the first size, when the search began


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What the search remembers. `Search()` is that of a job that has not begun."""

    num_workers: int = 0
    sizes: tuple[Size, ...] = ()  # by number of workers
    recent: Size | None = None  # since the last look or transition
    is_fresh: bool = True  # the next step is the first after a transition
    is_settled: bool = False
    num_shifted_looks: int = 0  # in a row
    num_blocked_looks: int = 0  # to come, that order no workers: there were none to be had
    elapsed_s: float = 0.0
    initial_samples_per_s: float = 0.0
    initial_total_s: float = 0.0


def observe(
    memory: Search,
    num_workers: int,
    batch: int,
    seconds: float,
    price_per_s: float,
    *,
    num_steps: int = 1,
) -> Search:
    """Learn from one step, or from some that took `seconds` in all.

    The first after a transition counts as time, not as throughput, and so do those told with it.
    """
    if num_workers != memory.num_workers:
        memory = transition(memory, num_workers)
    memory = replace(memory, elapsed_s=memory.elapsed_s + seconds)
    if memory.is_fresh:
        return replace(memory, is_fresh=False)
    step = Size(
        num_workers=num_workers,
        samples_per_s=batch * num_steps / seconds,
        price_per_s=price_per_s,
        batch=batch,
        num_steps=num_steps,
    )
    return replace(
        memory,
        sizes=memory.sizes if memory.is_settled else _recorded(memory.sizes, step),
        recent=_mean(memory.recent, step),
    )


def transition(memory: Search, num_workers: int) -> Search:
    """The roster changed, perhaps only in who is in it. What was learned of each size is kept."""
    return replace(
        memory,
        num_workers=num_workers,
        recent=None,
        is_fresh=True,
        is_settled=False,
        num_shifted_looks=0,
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
    """The size to go to, or None to stay, and why. Without a reason it was no time to look.

    `waiting`: workers that were ordered have yet to join, or to leave.
    """
    if waiting or memory.recent is None or memory.recent.num_steps < settings.period_steps:
        return memory, None, ""
    memory, news = _check_shift(memory, settings)
    memory = _with_start(memory, samples_left)
    seen = tuple(s for s in memory.sizes if s.num_steps >= settings.period_steps)
    job = Job(
        elapsed_s=memory.elapsed_s,
        samples_left=samples_left,
        initial_samples_per_s=memory.initial_samples_per_s,
        initial_total_s=memory.initial_total_s,
    )
    verdicts = [heuristic.worth(a, b, job) for a, b in pairwise(seen)]
    target, why = _choose(seen, verdicts, settings, workers)
    target = max(workers.min, min(target, workers.max))
    if target > memory.num_workers and memory.num_blocked_looks > 0:
        target, blocked = memory.num_workers, memory.num_blocked_looks - 1
        why = f"{why} more, but none could be started; {blocked} looks until another try; stay at"
        memory = replace(memory, num_blocked_looks=blocked)
    here = next(s for s in seen if s.num_workers == memory.num_workers)
    stays = target == memory.num_workers
    memory = replace(
        memory, recent=None, is_settled=stays and here.num_steps >= settings.settle_steps
    )
    return memory, None if stays else target, f"{news}{why} {target}"


def _choose(
    seen: tuple[Size, ...],
    verdicts: list[tuple[bool, str]],
    settings: ScalingSettings,
    workers: WorkerSettings,
) -> tuple[int, str]:
    """The size to go to, before the bounds, and why, up to the number."""
    low, high, step = seen[0].num_workers, seen[-1].num_workers, settings.step_workers
    if not verdicts:
        if workers.min == workers.max:
            return low, "min and max are the same; stay at"
        return high + step if high < workers.max else low - step, f"only {low} workers seen; try"

    passed = [p for p, _ in verdicts]
    # The pair that decides: the first that fails, else the last that passes.
    at = passed.index(False) if False in passed else len(passed) - 1
    smaller, larger = seen[at], seen[at + 1]
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
            f"{settings.settle_steps} steps; measure on at"
        )
    return smaller.num_workers, f"{why}; settle at"


def _check_shift(memory: Search, settings: ScalingSettings) -> tuple[Search, str]:
    """Once settled: has the throughput moved away, and stayed away, from what it settled on?"""
    if not memory.is_settled or memory.recent is None:
        return memory, ""
    was = next(s for s in memory.sizes if s.num_workers == memory.num_workers).samples_per_s
    now = memory.recent.samples_per_s
    if abs(now / was - 1) <= settings.look_again:
        return replace(memory, num_shifted_looks=0), ""
    looks = memory.num_shifted_looks + 1
    if looks < LASTING_LOOKS:
        return replace(memory, num_shifted_looks=looks), ""
    anew = replace(memory, sizes=(memory.recent,), is_settled=False, num_shifted_looks=0)
    return anew, (
        f"{memory.num_workers} workers went from {was:.4g} to {now:.4g} samples/s "
        f"({now / was - 1:+.0%}) for {looks} looks; search anew: "
    )


def _with_start(memory: Search, samples_left: int) -> Search:
    """At the first look of a job: what it would take at the size it began with."""
    if memory.initial_samples_per_s > 0 or memory.recent is None:
        return memory
    speed = memory.recent.samples_per_s
    return replace(
        memory,
        initial_samples_per_s=speed,
        initial_total_s=memory.elapsed_s + samples_left / speed,
    )


def _recorded(sizes: tuple[Size, ...], step: Size) -> tuple[Size, ...]:
    known = {s.num_workers: s for s in sizes}
    known[step.num_workers] = _mean(known.get(step.num_workers), step)
    return tuple(known[n] for n in sorted(known))


def _mean(so_far: Size | None, step: Size) -> Size:
    if so_far is None:
        return step
    n = so_far.num_steps + step.num_steps
    part = step.num_steps / n
    return replace(
        step,
        samples_per_s=so_far.samples_per_s + (step.samples_per_s - so_far.samples_per_s) * part,
        price_per_s=so_far.price_per_s + (step.price_per_s - so_far.price_per_s) * part,
        num_steps=n,
    )
