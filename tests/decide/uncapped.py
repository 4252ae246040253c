"""A user's faulty policy: equal shares that ignore caps."""

from __future__ import annotations

import msgspec
import numpy as np

from evenstep.ports import Memory, Move
from evenstep.types import Fleet, IntArray, Outcome


class Uncapped(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ignores caps from the start, or after the first outcome."""

    at_first: bool = True

    def first_shares(self, memory: Memory | None, fleet: Fleet, batch: int) -> tuple[Memory, Move]:
        if self.at_first:
            return None, (_equal(fleet, batch), "equal shares")
        return None, (np.array([batch - int(fleet.upper[1]), fleet.upper[1]]), "as caps allow")

    def next(
        self, memory: Memory, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[Memory, Move | None]:
        return None, (_equal(fleet, batch), "equal shares")


def _equal(fleet: Fleet, batch: int) -> IntArray:
    return np.full(len(fleet), batch // len(fleet))
