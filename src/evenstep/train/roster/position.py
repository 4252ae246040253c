"""How far each worker is, and which ranks of a new generation have the newest state.

When a worker dies during an all-reduce, some of the others may have its result and some not. So a
new generation first compares positions: the highest reduced step wins, and ranks that have it send
their state to ranks that have not. The same holds for each sum between steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from evenstep.train.comm.group import Group

FIELDS = 5  # has_state, steps, sums, bytes of the last sum, whether gradients are unused


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Steps whose gradients this worker has reduced, and other sums that it has completed."""

    has_state: bool = False  # of the run
    steps: int = 0
    sums: int = 0
    sum_bytes: int = 0  # size of the last sum's result


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestState:
    """Which ranks of a group have the newest state, and its position."""

    position: Position  # of the sources; without `has_state`: no rank has one
    sources: tuple[int, ...]
    missing_sum: tuple[int, ...]  # sources without the result of the last sum
    has_gradients: bool  # that no optimizer has used yet: part of the state

    def share_last_sum(self, group: Group, result: torch.Tensor) -> torch.Tensor:
        """Send the last sum to ranks that miss it; `result` is what this rank has, as bytes."""
        if not self.missing_sum:
            return result
        root = next(rank for rank in self.sources if rank not in self.missing_sum)
        if group.rank != root:
            result = torch.zeros(self.position.sum_bytes, dtype=torch.uint8)
        group.broadcast(result, root=root)
        return result


def compare_positions(group: Group, own: Position, *, has_gradients: bool) -> NewestState:
    """Find the ranks with the newest state. All ranks of the group call this."""
    table = torch.zeros(group.world, FIELDS, dtype=torch.float64)
    row = (own.has_state, own.steps, own.sums, own.sum_bytes, has_gradients)
    table[group.rank] = torch.tensor(row, dtype=torch.float64)
    rows = [tuple(map(int, row)) for row in group.sum(table).tolist()]
    # If no rank has a state, all take the leader's fresh one.
    furthest = max((row[1] for row in rows if row[0]), default=-1)
    sources = tuple(r for r, row in enumerate(rows) if row[0] and row[1] == furthest) or (0,)
    sums = max(rows[rank][2] for rank in sources)
    missing_sum = tuple(rank for rank in sources if rows[rank][2] < sums)
    holder = next(rank for rank in sources if rows[rank][2] == sums)
    position = Position(
        has_state=furthest >= 0, steps=max(0, furthest), sums=sums, sum_bytes=rows[holder][3]
    )
    unused = any(rows[rank][4] for rank in sources)
    return NewestState(
        position=position, sources=sources, missing_sum=missing_sum, has_gradients=unused
    )
