"""`static`: dynamic batching's open loop, shares by rated hardware speed."""

from __future__ import annotations

import msgspec
import numpy as np

from evenstep.decide.batching.rules import working_bounds
from evenstep.decide.carry_over import rated_speed
from evenstep.decide.split import in_proportion
from evenstep.ports import Move
from evenstep.types import Fleet, IntArray, Outcome


class Static(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares proportional to FLOPS if known for all workers, else to cores. Stateless."""

    def first_shares(self, memory: None, fleet: Fleet, batch: int) -> tuple[None, Move]:
        """Shares by rated speed alone."""
        rated = rated_speed(fleet)
        shares = in_proportion(rated, batch, *working_bounds(fleet, batch))
        unit = "FLOPS" if np.isfinite(fleet.flops).all() else "cores"
        return None, (shares, f"proportional to {unit}, {rated.min():.4g} to {rated.max():.4g}")

    def next(
        self, memory: None, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[None, Move | None]:
        """The same shares, regardless of measurements."""
        _, move = self.first_shares(memory, fleet, batch)
        return None, None if (move[0] == shares).all() else move
