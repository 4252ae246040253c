"""The plans in force: the share of each rank at a step, and the learning-rate factor with it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from evenstep.train.measure.lr_scale import LrScale
from evenstep.train.report import RankPlan


class Plans:
    """The plans of one generation, by the step from which each is valid."""

    def __init__(self, lr_scale: LrScale) -> None:
        self.warmup_steps = 0  # over which the first learning-rate factor is reached
        self._lr_scale = lr_scale
        self._plans: list[RankPlan] = []

    def __bool__(self) -> bool:
        return bool(self._plans)

    @property
    def newest(self) -> RankPlan:
        """The plan announced last; it may not be in force yet."""
        return self._plans[-1]

    def shares_at(self, step: int) -> tuple[int, ...]:
        """The share of each rank at a step."""
        at = bisect_right(self._plans, step, key=lambda plan: plan.from_step)
        return self._plans[at - 1].shares

    def restart(self, plans: Sequence[RankPlan]) -> None:
        """Replace all plans: a generation begins."""
        self._plans = list(plans)

    def extend(self, plan: RankPlan) -> None:
        """Add the plan that the leader announced in the pulse."""
        self._plans.append(plan)
        # The factor travels in single precision: an unchanged one must not restart a warm-up.
        if math.isclose(plan.lr_factor, self._lr_scale.target, rel_tol=1e-5):
            return
        over_steps = self._lr_scale.steps_left(plan.from_step)  # of a warm-up in progress
        if self._lr_scale.target == 1.0:
            over_steps = self.warmup_steps  # it starts only now: gradient noise came first
        self._lr_scale.set_target(plan.from_step, plan.lr_factor, over_steps)
