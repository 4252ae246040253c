"""The speed of training as a script can ask for it, from the reports of all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from evenstep.decide.curve_points import CurvePoints, learn
from evenstep.decide.estimate import FIXED_FRACTION, compare
from evenstep.train.step import Report, Step
from evenstep.types import Estimate, Fleet, IntArray, Outcome, Worker

NUM_STEPS = 64
"""The last steps, from which curves are fitted when they are asked for."""

NOISE = 0.03
"""Prior relative standard deviation of a step's time."""


class RecentSteps:
    """The last committed steps of the present number of workers."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._steps: deque[tuple[float, Sequence[Report]]] = deque(maxlen=NUM_STEPS)
        step.on_committed.append(self._committed)

    def _committed(self) -> None:
        step = self._step
        if self._steps and len(self._steps[-1][1]) != len(step.reports):
            self._steps.clear()
        self._steps.append((step.seconds, step.reports))

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all workers together, over these steps; 0 if there are none yet."""
        seconds = sum(seconds for seconds, _ in self._steps)
        samples = sum(report.samples for _, reports in self._steps for report in reports)
        return samples / seconds if seconds else 0.0

    def estimate(self) -> Estimate | None:
        """What equal shares and the best ones would give; None before the first step."""
        if not self._steps:
            return None
        num = len(self._steps[-1][1])
        ids = tuple(f"{rank:06}" for rank in range(num))
        shares = _shares(self._steps[-1][1])
        batch = max(1, int(shares.sum()))
        fleet = Fleet.of([Worker(id=i) for i in ids], batch=batch)
        points = CurvePoints.empty().carried_over(fleet, NOISE)
        for _, reports in self._steps:
            curves = points.with_guesses(fleet, batch).curves(FIXED_FRACTION)
            points = learn(points, curves, _outcome(reports))
        curves = points.with_guesses(fleet, batch).curves(FIXED_FRACTION)
        alike = [(s, reports) for s, reports in self._steps if (_shares(reports) == shares).all()]
        compute_s = np.mean([[r.compute_s for r in reports] for _, reports in alike], axis=0)
        mean_s = float(np.mean([seconds for seconds, _ in alike]))
        return compare(curves, fleet, shares, compute_s, mean_s)


def _shares(reports: Sequence[Report]) -> IntArray:
    return np.array([report.samples for report in reports], dtype=np.int64)


def _outcome(reports: Sequence[Report]) -> Outcome:
    shares = _shares(reports)
    compute_s = np.array([report.compute_s for report in reports])
    measured = (shares > 0) & (compute_s > 0)
    unknown = np.full(len(shares), np.nan)
    return Outcome(
        step=0,
        samples=shares,
        compute_s=np.where(measured, compute_s, np.nan),
        forecast_samples_per_s=unknown,
    )
