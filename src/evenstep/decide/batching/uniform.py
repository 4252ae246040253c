"""`uniform`: equal shares, the baseline."""

from __future__ import annotations

import msgspec

from evenstep.decide.split import check_bounds, water_fill
from evenstep.ports import Move
from evenstep.types import Fleet, IntArray, Outcome


class Uniform(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal shares, as far as integers and bounds allow. Stateless."""

    def first_shares(self, memory: None, fleet: Fleet, batch: int) -> tuple[None, Move]:
        """Equal shares."""
        check_bounds(batch, fleet.lower, fleet.upper)
        shares = water_fill(batch, fleet.lower, fleet.upper)
        return None, (shares, f"equal shares for {len(fleet)} workers")

    def next(
        self, memory: None, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[None, Move | None]:
        """Equal shares, regardless of measurements."""
        _, move = self.first_shares(memory, fleet, batch)
        return None, None if (move[0] == shares).all() else move
