"""A policy as a user may write it: it gives everyone the same, whatever the caps."""

from __future__ import annotations

import msgspec
import numpy as np

from evenstep.ports import Memory, Move
from evenstep.types import Fleet, IntArray, Outcome


class Heedless(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Caps are ignored from the start, or once there is an outcome."""

    at_first: bool = True

    def seat(self, memory: Memory | None, fleet: Fleet, batch: int) -> tuple[Memory, Move]:
        if self.at_first:
            return None, (_alike(fleet, batch), "alike")
        return None, (np.array([batch - int(fleet.upper[1]), fleet.upper[1]]), "as caps allow")

    def next(
        self, memory: Memory, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[Memory, Move | None]:
        return None, (_alike(fleet, batch), "alike")


def _alike(fleet: Fleet, batch: int) -> IntArray:
    return np.full(len(fleet), batch // len(fleet))
