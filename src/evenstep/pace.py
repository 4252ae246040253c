"""Rate limit for decisions: at once when a step shows something new, rarely while all is calm.

The brain shares a machine with training. A decision takes a millisecond or two: nothing next to a
step of a second, a fifth of a step of ten milliseconds. So decisions get a token bucket of time,
which fills while nothing happens and is spent on every step when something does. Reporting a step
to a brain in another process takes time too, and is limited in the same way.

Only training time fills the bucket: a long evaluation must not pay for the steps after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from evenstep.types import SHORTEST_S, Steps

Sampled = tuple[list[tuple[float, float]], Steps, Steps]
"""Each worker's mean compute time and its deviation, the steps in between, and those of earlier
generations."""

BUDGET_FRACTION = 0.005  # of training time that decisions may take in the long run
BURST_S = 0.1  # token-bucket burst: initial and maximum decision-time budget,
BURST_STEPS = 2.0  # or this many steps if they are longer: good shares take several decisions
MIN_CHANGE = 0.05  # increase of the idle fraction of a step that triggers a decision
CHANGE_DEVIATIONS = 4.0  # mean deviations that it must exceed too: noise must not drain the bucket
WATCHED_STEPS = 5  # steps decided on after each plan
GAIN = 0.2  # EWMA gain of the idle fraction and its deviation
MAX_STEP_RATIO = 3.0  # time beyond this many times the slowest compute time is not training


class Pacer:
    """Decides which steps are worth a decision."""

    def __init__(self) -> None:
        self._debt_s = 0.0  # decision time spent and not yet refilled
        self._trained_s = 0.0
        self._last_s: float | None = None
        self._next_calm_s = 0.0  # training time of the next decision while calm
        self._idle: float | None = None  # EWMA of the idle fraction of a step
        self._deviation = 0.0
        self._num_watched = WATCHED_STEPS
        self.eventful = True  # the last step showed a change, or is one to watch

    def should_decide(self, now_s: float, compute_s: Sequence[float], *, num: int = 1) -> bool:
        """Whether to decide on a step with these compute times.

        `num`: steps since the last call, including this one.
        """
        slowest_s = max(compute_s, default=0.0)
        if self._last_s is not None:
            max_s = MAX_STEP_RATIO * num * slowest_s if slowest_s > SHORTEST_S else math.inf
            trained_s = min(now_s - self._last_s, max_s)
            self._trained_s += trained_s
            self._debt_s = max(0.0, self._debt_s - BUDGET_FRACTION * trained_s)
        self._last_s = now_s
        idle = 1.0 - sum(compute_s) / (len(compute_s) * slowest_s) if slowest_s > 0 else 0.0
        if self._idle is None:
            self._idle = idle
        increase = idle - self._idle
        changed = increase > max(MIN_CHANGE, CHANGE_DEVIATIONS * self._deviation)
        self._idle += GAIN * increase
        self._deviation += GAIN * (abs(increase) - self._deviation)
        self.eventful = changed or self._num_watched > 0
        self._num_watched = WATCHED_STEPS if changed else max(0, self._num_watched - 1)
        has_budget = self._debt_s < max(BURST_S, BURST_STEPS * slowest_s)
        return has_budget and (self.eventful or self._trained_s >= self._next_calm_s)

    def decided(self, took_s: float, *, moved: bool) -> None:
        """Account for a decision: the time it took, and whether it made a new plan."""
        self._debt_s += took_s
        # Spend half of the budget while calm, so that the bucket refills.
        self._next_calm_s = self._trained_s + 2 * took_s / BUDGET_FRACTION
        if moved:
            self._num_watched = WATCHED_STEPS
            self._idle = None


class MeanTimes:
    """Mean compute times of the workers since the last decision.

    A single noisy step says little, and the steps between decisions would be lost. Only steps with
    the same samples are averaged.
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
        restart: bool,
        num: int = 1,
    ) -> None:
        """Add a step, or `num` steps by their means and spreads. `restart`: drop earlier ones."""
        if restart or self._samples != list(samples) or not self._num:
            self._samples, self._num = list(samples), 0
            self._sums, self._squares = [0.0] * len(samples), [0.0] * len(samples)
        for i, mean_s in enumerate(compute_s):
            sd_s = spread_s[i] if spread_s else 0.0
            self._sums[i] += num * mean_s
            self._squares[i] += num * (mean_s * mean_s + sd_s * sd_s)
        self._num += num

    def take(self) -> list[tuple[float, float]]:
        """Each worker's mean and standard deviation; the next `add` restarts."""
        means = [total / self._num for total in self._sums]
        squares = [total / self._num for total in self._squares]
        self._num = 0
        spreads = (math.sqrt(max(0.0, b - a * a)) for a, b in zip(means, squares, strict=True))
        return list(zip(means, spreads, strict=True))


NO_STEPS = Steps()


class SkippedSteps:
    """Counts the steps without a decision, for the next one with a decision.

    Steps of an earlier generation count by their samples only: their times were measured on another
    roster. Their own totals are kept beside, for people.
    """

    def __init__(self) -> None:
        self._generation, self._steps, self._earlier = 0, Steps(), Steps()

    def add(self, generation: int, steps: Steps, earlier: Steps = NO_STEPS) -> None:
        """Count more steps; their samples include those of `earlier` generations."""
        if generation != self._generation:
            earlier_samples = self._steps.samples
            ended = Steps(num=self._steps.num, seconds=self._steps.seconds)
            self._earlier = replace(self._earlier + ended, samples=earlier_samples)
            self._generation, self._steps = generation, Steps(samples=earlier_samples)
        self._steps += steps
        self._earlier += earlier

    def take(self, generation: int) -> tuple[Steps, Steps]:
        """The totals, and those of earlier generations; the counts restart at zero."""
        self.add(generation, Steps())
        found, self._steps, self._earlier = (self._steps, self._earlier), Steps(), Steps()
        return found


class Measured(Protocol):
    """What one worker measured in a step."""

    @property
    def samples(self) -> int: ...
    @property
    def compute_s(self) -> float: ...


class Sampling:
    """Which steps a leader reports: each new one at once, uneventful ones by their mean."""

    def __init__(self) -> None:
        self._pace, self._means, self._tally = Pacer(), MeanTimes(), SkippedSteps()
        self._unreported: tuple[int, Steps] | None = None  # the last step, if it was skipped

    def sample(
        self,
        now_s: float,
        reports: Sequence[Measured],
        *,
        generation: int = 0,
        seconds: float = 0.0,
    ) -> Sampled | None:
        """Whether to report a step, which took a generation so many seconds.

        If so: mean and deviation of each worker's compute time since the last report, and the steps
        in between, which were not reported.
        """
        if self._unreported is not None:
            self._tally.add(*self._unreported)
        compute_s, samples = [r.compute_s for r in reports], [r.samples for r in reports]
        wanted = self._pace.should_decide(now_s, compute_s)
        self._means.add(samples, compute_s, restart=self._pace.eventful)
        step = Steps(num=1, seconds=seconds, samples=sum(samples))
        self._unreported = None if wanted else (generation, step)
        return (self._means.take(), *self._tally.take(generation)) if wanted else None

    def rest(self) -> Sampled | None:
        """The same for the last step, if it was skipped: no other will carry its totals."""
        if self._unreported is None:
            return None
        generation, self._unreported = self._unreported[0], None
        return self._means.take(), *self._tally.take(generation)

    def decided(self, took_s: float, *, moved: bool) -> None:
        """A decision or a report was made: what it took, and whether the plan has changed."""
        self._pace.decided(took_s, moved=moved)
