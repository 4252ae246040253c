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

from evenstep.types import SHORTEST_S, Steps

PART = 0.005  # of the time, at most, over any longer while
SAVED_S = 0.1  # of deciding: what may be saved up for livelier times, and is there to begin with
NOTICED = 0.05  # of a step lost to waiting, beyond what is usual, makes it worth a decision
UNLIKELY = 4.0  # times what it usually varies by: else noise would use up what is saved
FRESH_STEPS = 5  # watched closely after each plan
MEMORY = 0.2  # weight of the newest step in what is usual
LONGEST = 3.0  # times what its slowest worker computed: what a step took beyond is no training


class Pace:
    """Tells which steps are worth a decision."""

    def __init__(self) -> None:
        self._left_s = SAVED_S
        self._trained_s = 0.0
        self._seen_s: float | None = None
        self._calm_until_s = 0.0
        self._usual: float | None = None  # part of a step lost to waiting
        self._varies = 0.0
        self._fresh = FRESH_STEPS

    def wants(self, now_s: float, compute_s: Sequence[float], *, num: int = 1) -> bool:
        """Whether to decide on a step in which the workers computed for so long.

        `num`: steps since it was last asked about one, with this one.
        """
        longest = max(compute_s, default=0.0)
        if self._seen_s is not None:
            most_s = LONGEST * num * longest if longest > SHORTEST_S else math.inf
            trained_s = min(now_s - self._seen_s, most_s)
            self._trained_s += trained_s
            self._left_s = min(SAVED_S, self._left_s + PART * trained_s)
        self._seen_s = now_s
        idle = 1.0 - sum(compute_s) / (len(compute_s) * longest) if longest > 0 else 0.0
        if self._usual is None:
            self._usual = idle
        beyond = idle - self._usual
        noticed = beyond > max(NOTICED, UNLIKELY * self._varies)
        self._usual += MEMORY * beyond
        self._varies += MEMORY * (abs(beyond) - self._varies)
        lively = noticed or self._fresh > 0
        self._fresh = FRESH_STEPS if noticed else max(0, self._fresh - 1)
        return self._left_s > 0 and (lively or self._trained_s >= self._calm_until_s)

    def decided(self, took_s: float, *, moved: bool) -> None:
        """A decision was made: what it took, and whether it made a new plan."""
        self._left_s -= took_s
        # Half of what comes in is kept for livelier times.
        self._calm_until_s = self._trained_s + 2 * took_s / PART
        if moved:
            self._fresh = FRESH_STEPS
            self._usual = None


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
