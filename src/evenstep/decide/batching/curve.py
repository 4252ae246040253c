"""`curve`: LB-BSP on GPUs as of 2018, the min-max split over fitted flat-then-linear curves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from evenstep.decide.batching.rules import is_valid, require, working_bounds
from evenstep.decide.carry_over import carry_over, previous_rows
from evenstep.decide.curve_points import CurvePoints, learn
from evenstep.decide.curves import FlatLinear
from evenstep.decide.split import in_proportion, split
from evenstep.ports import Move
from evenstep.types import Fleet, IntArray, Outcome

NOISE = 0.03
"""Prior relative standard deviation of a step's time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CurveState:
    """The points of every worker, the curves through them, and the progress of profiling."""

    points: CurvePoints
    curves: FlatLinear
    base: IntArray  # shares that `sizes` are relative to
    num_planned: IntArray  # profiling steps planned so far


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Profile each worker at a few sizes, fit `max(T_s, m x + c)`, solve; refit on every step.

    Some workers run at a small size while others run at a large one, so the batch stays constant.
    A joiner inherits the curve of its kind; only the first worker of a kind is profiled. The
    paper's memory bound is the upper bound of the share.
    """

    sizes: tuple[float, ...] = (0.5, 1.0, 1.5)  # relative to the first share, tried in turn
    steps_per_size: int = 2  # the first step at a new size is often slow
    min_gain: float = 0.005  # fraction of the step time that a new plan must save

    def __post_init__(self) -> None:
        require(
            len(self.sizes) >= 2 and min(self.sizes) > 0 and max(self.sizes) < float("inf"),
            "sizes",
            f"must be two or more numbers above 0, got {self.sizes}",
        )
        require(
            self.steps_per_size >= 1,
            "steps_per_size",
            f"must be 1 or more, got {self.steps_per_size}",
        )
        require(0 <= self.min_gain < 1, "min_gain", f"must lie in [0, 1), got {self.min_gain}")

    def first_shares(
        self, memory: CurveState | None, fleet: Fleet, batch: int
    ) -> tuple[CurveState, Move]:
        """Shares by the known curves; profiling starts for workers of a new kind."""
        lower, upper = working_bounds(fleet, batch)
        before = memory.points if memory else CurvePoints.empty()
        points = before.carried_over(fleet, NOISE)
        curves = points.with_guesses(fleet, batch).curves(0.0)
        planned = np.where(points.known, self._profile_steps, 0)
        if memory is not None:
            rows = previous_rows(before.ids, fleet.ids)
            kept = carry_over(memory.num_planned.astype(float), rows, 0.0)
            planned = np.where(rows < 0, planned, kept)
        base = split(curves, batch, lower, upper)
        planned = planned.astype(np.int64)
        memory = CurveState(points=points, curves=curves, base=base, num_planned=planned)
        if (memory.num_planned < self._profile_steps).any():
            return self._profile(memory, fleet, batch)
        return memory, (base, f"by the fitted curves of {len(fleet)} workers")

    def next(
        self, memory: CurveState, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[CurveState, Move | None]:
        """The next profiling size; after profiling, the min-max optimum if it gains enough."""
        points = learn(memory.points, memory.curves, outcome)
        curves = points.with_guesses(fleet, batch).curves(0.0)
        memory = replace(memory, points=points, curves=curves)
        if (memory.num_planned < self._profile_steps).any():
            memory, move = self._profile(memory, fleet, batch)
            return memory, None if (move[0] == shares).all() else move
        lower, upper = working_bounds(fleet, batch)
        wanted = split(curves, batch, lower, upper)
        now_s, then_s = curves.seconds(shares), float(curves.seconds(wanted).max())
        i = int(now_s.argmax())
        if is_valid(shares, batch, lower, upper) and then_s >= now_s[i] * (1.0 - self.min_gain):
            return memory, None
        why = f"expected step {now_s[i] * 1e3:.4g} -> {then_s * 1e3:.4g} ms"
        return memory, (wanted, f"{fleet.ids[i]} is slowest: {shares[i]} -> {wanted[i]}, {why}")

    def curves(self, memory: CurveState) -> FlatLinear:
        """As fitted so far; of a worker that is not measured yet, a guess."""
        return memory.curves

    @property
    def _profile_steps(self) -> int:
        return len(self.sizes) * self.steps_per_size

    def _profile(self, memory: CurveState, fleet: Fleet, batch: int) -> tuple[CurveState, Move]:
        """The next size for every worker being profiled, base shares for the others."""
        profiled = memory.num_planned < self._profile_steps
        size = memory.num_planned // self.steps_per_size
        # Neighbours run at different sizes, so that the sum hardly changes.
        turn = (np.cumsum(profiled) + size) % len(self.sizes)
        factor = np.where(profiled, np.array(self.sizes)[turn], 1.0)
        weight = np.maximum(memory.base, 0.5) * factor
        shares = in_proportion(weight, batch, *working_bounds(fleet, batch))
        num, at = int(profiled.sum()), int(size[profiled].min()) + 1
        memory = replace(memory, num_planned=memory.num_planned + profiled)
        return memory, (shares, f"profiling {num} workers, size {at} of {len(self.sizes)}")
