"""The search for the size of the cluster: throughput per size in, the next size and why out.

The rules are those of the published autoscaling engine (Or, Zhang and Freedman, MLSys 2020). Where
it is silent, because its sizes are all multiples of the step, we read it so:

- A step that would pass `min` or `max` stops there; the shorter pair is judged like any other.
- A size seen in passing, for fewer than `period_steps` steps, is no data point yet. Nor is one that
  is closer than `step_workers` to another of which more is known, unless it is a bound: what a
  single worker brings is lost in the noise of ten steps.
- While workers are on their way in or out only steps that are as usual count: whoever starts up on
  the same host slows the others down.
- The throughput of a size is all its samples over all its seconds. (The published engine takes the
  mean over steps; how steps are told, singly or in a sum, would then show in it.)
- "The lowest `passes` pairs all pass" needs that many pairs: with fewer the search looks down.
- The search has settled once the size it chose has `settle_steps` of data itself. From then on its
  record stands still, as the yardstick for a shift in throughput.
- A shift for good is one that `LASTING_LOOKS` looks in a row have seen, over `LASTING_S` seconds.
  All records are then from another time: they are dropped, and the search begins again from the
  size it is at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from evenstep.config import ScalingSettings, WorkerSettings
from evenstep.ports import ScalingHeuristic

LASTING_LOOKS = 3
LASTING_S = 30.0  # with short steps, three looks are no time
USUAL = 0.05  # a throughput that is off by less is that of the size


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is known of one size of the cluster, from `num_steps` steps; the batch of the last."""

    num_workers: int
    samples: int
    seconds: float
    price_per_s: float  # of all its workers together: the mean over that time
    batch: int
    num_steps: int = 1

    @property
    def samples_per_s(self) -> float:
        """Of the whole cluster."""
        return self.samples / self.seconds

    def after(self, step: Size) -> Size:
        """With one more step, or some more."""
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
    shifted: Size | None = None  # what those have seen
    num_failures: int = 0  # in a row, of workers that were ordered
    num_blocked_looks: int = 0  # to come, that order no workers: there were none to be had
    elapsed_s: float = 0.0  # in steps
    initial_samples_per_s: float = 0.0
    initial_total_s: float = 0.0


def observe(memory: Search, step: Size, *, waiting: bool = False) -> Search:
    """Learn from one step, or from some that were told together.

    The first after a transition counts as time, not as throughput, and so do those told with it,
    and unusual ones while `waiting`: workers that were ordered have yet to join, or to leave.
    """
    if step.num_workers != memory.num_workers:
        memory = transition(memory, step.num_workers)
    memory = replace(memory, elapsed_s=memory.elapsed_s + step.seconds)
    if memory.is_fresh or (waiting and not _is_usual(memory.sizes, step)):
        return replace(memory, is_fresh=False)
    return replace(
        memory,
        sizes=memory.sizes if memory.is_settled else _recorded(memory.sizes, step),
        recent=memory.recent.after(step) if memory.recent else step,
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
    """The size to go to, or None to stay, and why. Without a reason it was no time to look."""
    if waiting or memory.recent is None or memory.recent.num_steps < settings.period_steps:
        return memory, None, ""
    memory, news = _check_shift(memory, settings)
    memory = _with_start(memory, samples_left)
    seen = _data_points(memory, settings, workers)
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
    here = next(s for s in memory.sizes if s.num_workers == memory.num_workers)
    stays = target == memory.num_workers
    memory = replace(
        memory, recent=None, is_settled=stays and here.num_steps >= settings.settle_steps
    )
    return memory, None if stays else target, f"{news}{why} {target}"


def _data_points(
    memory: Search, settings: ScalingSettings, workers: WorkerSettings
) -> tuple[Size, ...]:
    """The sizes to compare: seen for long enough, and far enough from those seen for longer."""
    known = [s for s in memory.sizes if s.num_steps >= settings.period_steps]
    points = [s for s in known if s.num_workers in (workers.min, workers.max)]
    between: list[int] = []
    present = memory.num_workers
    for size in sorted(known, key=lambda s: (-s.num_steps, s.num_workers != present)):
        near = any(abs(size.num_workers - n) < settings.step_workers for n in between)
        if size not in points and not near:
            points.append(size)
            between.append(size.num_workers)
    return tuple(sorted(points, key=lambda s: s.num_workers))


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
        return replace(memory, num_shifted_looks=0, shifted=None), ""
    looks = memory.num_shifted_looks + 1
    shifted = memory.shifted.after(memory.recent) if memory.shifted else memory.recent
    if looks < LASTING_LOOKS or shifted.seconds < LASTING_S:
        return replace(memory, num_shifted_looks=looks, shifted=shifted), ""
    now = shifted.samples_per_s
    anew = replace(memory, sizes=(shifted,), is_settled=False, num_shifted_looks=0, shifted=None)
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


def _is_usual(sizes: tuple[Size, ...], step: Size) -> bool:
    known = [s.samples_per_s for s in sizes if s.num_workers == step.num_workers]
    return bool(known) and abs(step.samples_per_s / known[0] - 1) <= USUAL


def _recorded(sizes: tuple[Size, ...], step: Size) -> tuple[Size, ...]:
    known = {s.num_workers: s for s in sizes}
    so_far = known.get(step.num_workers)
    known[step.num_workers] = so_far.after(step) if so_far else step
    return tuple(known[n] for n in sorted(known))
