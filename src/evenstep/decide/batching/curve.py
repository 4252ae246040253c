"""`curve`: LB-BSP on GPUs as of 2018, the min-max over fitted flat-then-linear curves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from evenstep.decide.batching.rules import hold, require, working_bounds
from evenstep.decide.curves import FlatLinear
from evenstep.decide.points import Points, blank, learn, lend, reseat
from evenstep.decide.seat import carry, follow
from evenstep.decide.split import in_proportion, split
from evenstep.ports import Move
from evenstep.types import Fleet, IntArray, Outcome

NOISE = 0.03
"""Relative deviation of a step that is expected before any was seen."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """The points of every worker, the curves through them, and how far its profiling has come."""

    points: Points
    curves: FlatLinear
    base: IntArray  # the shares around which sizes are tried
    visits: IntArray  # profiling steps planned so far


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Profile each worker at a few sizes, fit `max(T_s, m x + c)`, solve; refit as points come in.

    While some workers run at a small size others run at a large one, so the batch stays whole. A
    worker that joins takes the curve of its kind; only the first of a kind is profiled. The memory
    bound of the paper is the upper bound of the share.
    """

    sizes: tuple[float, ...] = (0.5, 1.0, 1.5)  # of the first share, tried in turn
    steps_per_size: int = 2  # the first step at a new size is often slow
    min_gain: float = 0.005  # part of a step's time that a new plan must be expected to save

    def __post_init__(self) -> None:
        require(
            len(self.sizes) >= 2 and min(self.sizes) > 0 and max(self.sizes) < float("inf"),
            "sizes",
            f"need two or more above 0, got {self.sizes}",
        )
        require(
            self.steps_per_size >= 1,
            "steps_per_size",
            f"must be 1 or more, got {self.steps_per_size}",
        )
        require(0 <= self.min_gain < 1, "min_gain", f"must lie in [0, 1), got {self.min_gain}")

    def seat(self, memory: Memory | None, fleet: Fleet, batch: int) -> tuple[Memory, Move]:
        """By the curves known; workers of a kind not seen before start to be profiled."""
        lower, upper = working_bounds(fleet, batch)
        before = memory.points if memory else blank(NOISE)
        points = reseat(before, fleet, NOISE)
        curves = lend(points, fleet, batch).curves(0.0)
        visits = np.where(points.known, self._profile_steps, 0)
        if memory is not None:
            rows = follow(before.ids, fleet.ids)
            visits = np.where(rows < 0, visits, carry(memory.visits.astype(float), rows, 0.0))
        base = split(curves, batch, lower, upper)
        memory = Memory(points=points, curves=curves, base=base, visits=visits.astype(np.int64))
        if (memory.visits < self._profile_steps).any():
            return self._profile(memory, fleet, batch)
        return memory, (base, f"by the curves of {len(fleet)} workers")

    def next(
        self, memory: Memory, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[Memory, Move | None]:
        """The next size of the profile; after it the min-max optimum, where it gains enough."""
        points = learn(memory.points, memory.curves, outcome)
        curves = lend(points, fleet, batch).curves(0.0)
        memory = replace(memory, points=points, curves=curves)
        if (memory.visits < self._profile_steps).any():
            memory, move = self._profile(memory, fleet, batch)
            return memory, None if (move[0] == shares).all() else move
        lower, upper = working_bounds(fleet, batch)
        wanted = split(curves, batch, lower, upper)
        now_s, then_s = curves.seconds(shares), float(curves.seconds(wanted).max())
        i = int(now_s.argmax())
        if hold(shares, batch, lower, upper) and then_s >= now_s[i] * (1.0 - self.min_gain):
            return memory, None
        why = f"{now_s[i] * 1e3:.4g} -> {then_s * 1e3:.4g} ms by the curves"
        return memory, (wanted, f"{fleet.ids[i]} is the last: {shares[i]} -> {wanted[i]}, {why}")

    @property
    def _profile_steps(self) -> int:
        return len(self.sizes) * self.steps_per_size

    def _profile(self, memory: Memory, fleet: Fleet, batch: int) -> tuple[Memory, Move]:
        """The next size for every worker that is being profiled, the rest in proportion."""
        trying = memory.visits < self._profile_steps
        size = memory.visits // self.steps_per_size
        # Neighbours try different sizes at a time, so that the sum hardly changes.
        turn = (np.cumsum(trying) + size) % len(self.sizes)
        factor = np.where(trying, np.array(self.sizes)[turn], 1.0)
        weight = np.maximum(memory.base, 0.5) * factor
        shares = in_proportion(weight, batch, *working_bounds(fleet, batch))
        num, at = int(trying.sum()), int(size[trying].min()) + 1
        memory = replace(memory, visits=memory.visits + trying)
        return memory, (shares, f"profiling {num} workers, size {at} of {len(self.sizes)}")
