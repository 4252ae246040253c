"""How far a worker is, and who of a new generation is furthest.

When a worker dies in the midst of a sum, some of the others may have its result and some not. So a
new generation begins by comparing: the highest committed step wins, and those who have it send
their state to those who do not. The same holds for sums between steps, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from evenstep.train.comm.group import Group

FIELDS = 5  # begun, steps, sums, bytes of the last sum, whether gradients are in use


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Steps whose gradients this worker has reduced, and sums it has taken besides."""

    begun: bool = False  # it has the state of a run
    steps: int = 0
    sums: int = 0
    sum_bytes: int = 0  # of the last one's result


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """Who of a group has the newest state, and where that is."""

    position: Position  # of the sources; not begun: nobody has
    sources: tuple[int, ...]
    late: tuple[int, ...]  # of those: ranks that miss the last sum
    gradients: bool  # their gradients belong to the state: no optimizer has used them yet

    def last_sum(self, group: Group, kept: torch.Tensor) -> torch.Tensor:
        """The bytes of the last sum on every rank; `kept` is what this rank holds."""
        if not self.late:
            return kept
        root = next(rank for rank in self.sources if rank not in self.late)
        if group.rank != root:
            kept = torch.zeros(self.position.sum_bytes, dtype=torch.uint8)
        group.broadcast(kept, root=root)
        return kept


def compare_positions(group: Group, mine: Position, *, gradients: bool) -> Ahead:
    """Learn where everyone is. All ranks of the group call this at once."""
    table = torch.zeros(group.world, FIELDS, dtype=torch.float64)
    row = (mine.begun, mine.steps, mine.sums, mine.sum_bytes, gradients)
    table[group.rank] = torch.tensor(row, dtype=torch.float64)
    rows = [tuple(map(int, row)) for row in group.sum(table).tolist()]
    # Nobody has begun: the leader's fresh state is as good as any, and all must have the same.
    furthest = max((row[1] for row in rows if row[0]), default=-1)
    sources = tuple(r for r, row in enumerate(rows) if row[0] and row[1] == furthest) or (0,)
    sums = max(rows[rank][2] for rank in sources)
    late = tuple(rank for rank in sources if rows[rank][2] < sums)
    holder = next(rank for rank in sources if rows[rank][2] == sums)
    position = Position(
        begun=furthest >= 0, steps=max(0, furthest), sums=sums, sum_bytes=rows[holder][3]
    )
    used = any(rows[rank][4] for rank in sources)
    return Ahead(position=position, sources=sources, late=late, gradients=used)
