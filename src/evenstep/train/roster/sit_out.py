"""Ranks that sit out the rest of a step.

A paused run may take in joiners while its workers are in the middle of a step, or between epochs,
and their script still takes sums there. The joiners cannot know of these. So each sum is announced
to them, and they add zeros to it, until the others are about to fetch the next batch.
"""

from __future__ import annotations

import torch

from evenstep.train.comm.group import Group
from evenstep.train.comm.summing import SUMMED

OVER = -1


def announce_sum(group: Group, root: int, values: torch.Tensor) -> None:
    """Before a sum: tell ranks that sit out how large it is."""
    _announce(group, root, values.numel(), SUMMED.index(values.dtype))


def announce_batch(group: Group, root: int) -> None:
    """The next batch comes: nobody sits out any more."""
    _announce(group, root, OVER, 0)


def _announce(group: Group, root: int, num: int, dtype: int) -> None:
    group.broadcast(torch.tensor([num, dtype]), root=root)


def sit_out(group: Group, root: int) -> None:
    """Add zeros to the sums of the others until they fetch the next batch."""
    while True:
        announced = torch.zeros(2, dtype=torch.int64)
        group.broadcast(announced, root=root)
        num, dtype = map(int, announced)
        if num == OVER:
            return
        group.sum(torch.zeros(num, dtype=SUMMED[dtype]))
