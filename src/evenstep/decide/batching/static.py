"""`static`: dynamic batching's open loop, shares by the label on the machine."""

from __future__ import annotations

import msgspec
import numpy as np

from evenstep.decide.batching.rules import working_bounds
from evenstep.decide.seat import rated_speed
from evenstep.decide.split import in_proportion
from evenstep.ports import Move
from evenstep.types import Fleet, IntArray, Outcome


class Static(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In proportion to FLOPS where all are known, else to cores. It remembers nothing."""

    def seat(self, memory: None, fleet: Fleet, batch: int) -> tuple[None, Move]:
        """Shares by the labels alone."""
        rated = rated_speed(fleet)
        shares = in_proportion(rated, batch, *working_bounds(fleet, batch))
        label = "FLOPS" if np.isfinite(fleet.flops).all() else "cores"
        return None, (shares, f"in proportion to {label}, {rated.min():.4g} to {rated.max():.4g}")

    def next(
        self, memory: None, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[None, Move | None]:
        """The same shares, whatever was measured."""
        _, move = self.seat(memory, fleet, batch)
        return None, None if (move[0] == shares).all() else move
