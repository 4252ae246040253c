"""What other shares would give: the throughput of equal shares, and the limit.

The shapes of step-time curves are those that were fitted; their levels are the mean times of recent
steps, so that noise counts alike for all shares: equal shares are 1.00x as fast as equal shares.
What a step takes beyond the mean time of its slowest worker stays as it is: noise, the rest of the
all-reduce, the optimizer and the loop itself.
"""

from __future__ import annotations

import numpy as np

from evenstep.decide.cluster import Cluster
from evenstep.decide.curves import FlatLinear
from evenstep.decide.split import split, water_fill
from evenstep.ports import FitsCurves, ScalableCurves
from evenstep.types import Estimate, Fleet, FloatArray, IntArray, StepDone, WorkerId

ESTIMATE_S = 1.0
"""Training time between two estimates: one takes about a millisecond."""

FIXED_FRACTION = 0.1
"""Part of a step's time taken as fixed where a worker was measured at one share only."""

WINDOW_S = 10.0
"""Training time over which the times of steps are averaged, roughly."""


class StepMeans:
    """Mean times of the last steps with the same roster and shares."""

    def __init__(self) -> None:
        self._key: object = None
        self._num = self._seconds = 0.0
        self._shares: dict[WorkerId, int] = {}
        self._compute_s: dict[WorkerId, float] = {}

    def add(self, event: StepDone) -> None:
        """A step, with the quiet ones before it if they had the same shares."""
        shares = {report.worker: report.samples for report in event.reports}
        key, steps = (event.generation, shares), event.steps
        num, seconds = float(steps.num), steps.seconds
        if key != self._key:
            self._key, self._shares, num, seconds = key, shares, 1.0, event.seconds
            self._num, self._seconds, self._compute_s = 0.0, 0.0, dict.fromkeys(shares, 0.0)
        elif self._seconds > WINDOW_S:
            self._num, self._seconds = self._num / 2, self._seconds / 2
            self._compute_s = {worker: s / 2 for worker, s in self._compute_s.items()}
        self._num, self._seconds = self._num + num, self._seconds + seconds
        for report in event.reports:
            self._compute_s[report.worker] += num * report.compute_s

    def estimate(self, cluster: Cluster) -> Estimate | None:
        """From the curves of a cluster's policy, or guesses; None without measurements."""
        fleet = cluster.fleet
        if fleet is None or not self._num:
            return None
        shares = np.array([self._shares.get(w, 0) for w in fleet.ids], dtype=np.int64)
        compute_s = np.array([self._compute_s.get(w, 0.0) for w in fleet.ids]) / self._num
        curves: ScalableCurves
        if isinstance(cluster.policy, FitsCurves):
            curves = cluster.policy.curves(cluster.memory)
        else:
            curves = guessed_curves(shares, compute_s)
        return compare(curves, fleet, shares, compute_s, self._seconds / self._num)


class Estimator:
    """Makes an estimate from the steps of a run: about once a second, and of each new roster."""

    def __init__(self) -> None:
        self._means = StepMeans()
        self._trained_s = self._due_s = 0.0
        self._generation = 0  # of the last one

    def add(self, event: StepDone, cluster: Cluster) -> Estimate | None:
        """A step, with the state after it; the estimate, if one is due."""
        self._trained_s += event.steps.seconds
        if cluster.generation != event.generation:
            return None  # its times are those of another roster
        self._means.add(event)
        if self._trained_s < self._due_s and event.generation == self._generation:
            return None
        self._due_s, self._generation = self._trained_s + ESTIMATE_S, event.generation
        return self._means.estimate(cluster)


def compare(
    curves: ScalableCurves, fleet: Fleet, shares: IntArray, compute_s: FloatArray, seconds: float
) -> Estimate | None:
    """The estimate for steps with these shares, mean compute times and mean seconds."""
    measured = (shares > 0) & (compute_s > 0)
    if not measured.any():
        return None
    batch, upper, none = int(shares.sum()), np.maximum(fleet.upper, shares), np.zeros_like(shares)
    expected_s = np.where(measured, curves.seconds(shares), 1.0)
    level = curves.scaled(np.where(measured, compute_s / expected_s, 1.0))
    now_s = np.where(measured, compute_s, 0.0)
    slowest_s = float(now_s.max())
    beyond_s = max(0.0, seconds - slowest_s)
    equal_s = level.seconds(water_fill(batch, none, upper))
    best_s = float(level.seconds(split(level, batch, none, upper)).max())
    return Estimate(
        measured=batch / (slowest_s + beyond_s),
        equal=batch / (float(equal_s.max()) + beyond_s),
        limit=batch / (min(best_s, slowest_s) + beyond_s),
        wait_fraction=_waiting(now_s, beyond_s),
        equal_wait_fraction=_waiting(equal_s, beyond_s),
    )


def guessed_curves(shares: IntArray, compute_s: FloatArray) -> FlatLinear:
    """Curves through one measurement of each worker; one without is as fast as the median."""
    measured = (shares > 0) & (compute_s > 0)
    each_s = compute_s / np.maximum(shares, 1)
    each_s = np.where(measured, each_s, np.median(each_s[measured]) if measured.any() else 1.0)
    at = np.where(measured, shares, max(1, int(shares.sum()) // len(shares)))
    return FlatLinear(
        floor_s=np.zeros(len(at)),
        fixed_s=FIXED_FRACTION * each_s * at,
        per_sample_s=(1.0 - FIXED_FRACTION) * each_s,
    )


def _waiting(compute_s: FloatArray, beyond_s: float) -> float:
    """The part of the workers' time that is spent waiting for the slowest."""
    slowest_s = float(compute_s.max())
    return max(0.0, slowest_s - float(compute_s.mean())) / (slowest_s + beyond_s)
