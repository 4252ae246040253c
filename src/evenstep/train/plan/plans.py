"""The plans in force: the share of each rank at a step, and the learning-rate factor with it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import msgspec


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Shares by rank, valid from a step on, and the learning-rate factor that goes with them."""

    from_step: int
    shares: tuple[int, ...]
    lr_factor: float = 1.0


class LrScale:
    """The factor on the learning rate where the global batch changes with the number of workers.

    It moves from one value to the next, at once or linearly over some steps.
    """

    def __init__(self) -> None:
        self._step, self._from, self._to, self._over = 0, 1.0, 1.0, 0

    @property
    def target(self) -> float:
        """The current factor, or the one at the end of the warm-up."""
        return self._to

    def set_target(self, step: int, factor: float, over_steps: int = 0) -> None:
        """Move to a factor from a step on, linearly over so many steps."""
        self._from, self._step = self.at(step), step
        self._to, self._over = factor, over_steps

    def steps_left(self, step: int) -> int:
        """Steps left, at the start of a step, until the target is reached."""
        return max(0, self._step + self._over - step)

    def at(self, step: int) -> float:
        """The factor at a step."""
        done = step - self._step + 1
        if done <= 0:
            return self._from
        if done >= self._over:
            return self._to
        return self._from + (self._to - self._from) * done / self._over

    def state_dict(self) -> dict[str, Any]:
        """For joiners and checkpoints."""
        return {"step": self._step, "from": self._from, "to": self._to, "over": self._over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another worker is."""
        self._step, self._from = state["step"], state["from"]
        self._to, self._over = state["to"], state["over"]


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
            over_steps = self.warmup_steps  # it starts now: gradient noise was measured before
        self._lr_scale.set_target(plan.from_step, plan.lr_factor, over_steps)
