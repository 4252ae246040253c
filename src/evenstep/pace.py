"""How often the brain is asked: at once when a step shows something new, seldom when all is calm.

The brain shares a machine with training. A decision takes it a millisecond or two, which is nothing
beside a step of a second and a fifth of one of ten milliseconds. So it gets a bounded part of the
time, saves up while nothing happens, and spends it on every step when something does. Telling the
brain of a step from another process takes time too, and is paced in the same way.

Only time in which the workers train counts: what a long evaluation saved up would be spent on
the steps after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from evenstep.types import SHORTEST_S, Steps

PART = 0.005  # of the time, at most, over any longer while
SAVED_S = 0.1  # of deciding: what may be saved up for livelier times, and is there to begin with,
SAVED_STEPS = 2.0  # or as many steps, if they take longer: to find shares takes some decisions
NOTICED = 0.05  # of a step lost to waiting, beyond what is usual, makes it worth a decision
UNLIKELY = 4.0  # times what it usually varies by: else noise would use up what is saved
FRESH_STEPS = 5  # watched closely after each plan
MEMORY = 0.2  # weight of the newest step in what is usual
LONGEST = 3.0  # times what its slowest worker computed: what a step took beyond is no training


class Pace:
    """Tells which steps are worth a decision."""

    def __init__(self) -> None:
        self._owed_s = 0.0  # spent, and not earned yet
        self._trained_s = 0.0
        self._seen_s: float | None = None
        self._calm_until_s = 0.0
        self._usual: float | None = None  # part of a step lost to waiting
        self._varies = 0.0
        self._fresh = FRESH_STEPS
        self.lively = True  # the last step showed something new, or is one of a few to watch

    def wants(self, now_s: float, compute_s: Sequence[float], *, num: int = 1) -> bool:
        """Whether to decide on a step in which the workers computed for so long.

        `num`: steps since it was last asked about one, with this one.
        """
        longest = max(compute_s, default=0.0)
        if self._seen_s is not None:
            most_s = LONGEST * num * longest if longest > SHORTEST_S else math.inf
            trained_s = min(now_s - self._seen_s, most_s)
            self._trained_s += trained_s
            self._owed_s = max(0.0, self._owed_s - PART * trained_s)
        self._seen_s = now_s
        idle = 1.0 - sum(compute_s) / (len(compute_s) * longest) if longest > 0 else 0.0
        if self._usual is None:
            self._usual = idle
        beyond = idle - self._usual
        noticed = beyond > max(NOTICED, UNLIKELY * self._varies)
        self._usual += MEMORY * beyond
        self._varies += MEMORY * (abs(beyond) - self._varies)
        self.lively = noticed or self._fresh > 0
        self._fresh = FRESH_STEPS if noticed else max(0, self._fresh - 1)
        is_left = self._owed_s < max(SAVED_S, SAVED_STEPS * longest)
        return is_left and (self.lively or self._trained_s >= self._calm_until_s)

    def decided(self, took_s: float, *, moved: bool) -> None:
        """A decision was made: what it took, and whether it made a new plan."""
        self._owed_s += took_s
        # Half of what comes in is kept for livelier times.
        self._calm_until_s = self._trained_s + 2 * took_s / PART
        if moved:
            self._fresh = FRESH_STEPS
            self._usual = None


class Means:
    """What workers computed for on average, since the last step that somebody was asked about.

    Where steps scatter, one of them says little, and of those in between nobody would hear. Only
    steps of the same samples are alike.
    """

    def __init__(self) -> None:
        self._samples: list[int] = []
        self._num = 0
        self._sums: list[float] = []
        self._squares: list[float] = []

    def add(
        self,
        samples: Sequence[int],
        compute_s: Sequence[float],
        spread_s: Sequence[float] = (),
        *,
        anew: bool,
        num: int = 1,
    ) -> None:
        """A step; or `num` of them by their means and spreads. `anew`: forget those before."""
        if anew or self._samples != list(samples) or not self._num:
            self._samples, self._num = list(samples), 0
            self._sums, self._squares = [0.0] * len(samples), [0.0] * len(samples)
        for i, mean_s in enumerate(compute_s):
            within = spread_s[i] if spread_s else 0.0
            self._sums[i] += num * mean_s
            self._squares[i] += num * (mean_s * mean_s + within * within)
        self._num += num

    def take(self) -> list[tuple[float, float]]:
        """The mean of each worker and its standard deviation, once."""
        means = [total / self._num for total in self._sums]
        squares = [total / self._num for total in self._squares]
        self._num = 0
        spreads = (math.sqrt(max(0.0, b - a * a)) for a, b in zip(means, squares, strict=True))
        return list(zip(means, spreads, strict=True))


class Tally:
    """Counts the steps that nobody was asked about, for the next one that somebody is.

    Those of an earlier generation count as samples only: how long a step took with other workers
    says nothing of those that there are now.
    """

    def __init__(self) -> None:
        self._generation, self._steps = 0, Steps()

    def add(self, generation: int, steps: Steps) -> None:
        """Some more."""
        if generation != self._generation:
            self._generation, self._steps = generation, Steps(samples=self._steps.samples)
        self._steps += steps

    def take(self, generation: int) -> Steps:
        """All of them, once."""
        self.add(generation, Steps())
        steps, self._steps = self._steps, Steps()
        return steps


class Measured(Protocol):
    """What one worker measured in a step."""

    @property
    def samples(self) -> int: ...
    @property
    def compute_s(self) -> float: ...


class Sampling:
    """Which steps a leader reports: each new one at once, uneventful ones by their mean."""

    def __init__(self) -> None:
        self._pace, self._means, self._tally = Pace(), Means(), Tally()

    def sample(
        self,
        now_s: float,
        reports: Sequence[Measured],
        *,
        generation: int = 0,
        seconds: float = 0.0,
        cost_s: float = 0.0,
    ) -> tuple[list[tuple[float, float]], Steps] | None:
        """Whether to report a step, at a cost, which took a generation so many seconds.

        If so: mean and deviation of each worker's compute time since the last report, and the steps
        in between, which were not reported.
        """
        compute_s, samples = [r.compute_s for r in reports], [r.samples for r in reports]
        wanted = self._pace.wants(now_s, compute_s)
        self._means.add(samples, compute_s, anew=self._pace.lively)
        if not wanted:
            self._tally.add(generation, Steps(num=1, seconds=seconds, samples=sum(samples)))
            return None
        if cost_s:
            self._pace.decided(cost_s, moved=False)
        return self._means.take(), self._tally.take(generation)

    def decided(self, took_s: float, *, moved: bool) -> None:
        """A decision or a report was made: what it took, and whether the plan has changed."""
        self._pace.decided(took_s, moved=moved)
