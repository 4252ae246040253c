"""Which samples a step trains on, and which of them are whose.

All workers walk one permutation of the dataset. Step i of an epoch is the same slice of it however
many workers there are; the plan only says where the slice is cut. So every sample is used exactly
once an epoch under any history of plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstep.decide.split import in_proportion
from evenstep.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of one dataset under a fixed global batch."""

    length: int
    batch: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    @property
    def num_steps(self) -> int:
        """Steps in an epoch."""
        whole, rest = divmod(self.length, self.batch)
        return whole + (1 if rest and not self.drop_last else 0)

    def permutation(self, epoch: int) -> IntArray:
        """The order of an epoch: the same on every machine."""
        if not self.shuffle:
            return np.arange(self.length, dtype=np.int64)
        return np.random.default_rng((self.seed, epoch)).permutation(self.length)

    def slice(self, step: int) -> tuple[int, int]:
        """Where a step of the epoch begins and ends in its permutation."""
        begin = step * self.batch
        return begin, min(begin + self.batch, self.length)


def cut(num_samples: int, shares: Sequence[int]) -> list[tuple[int, int]]:
    """Where each rank's part of a step's samples begins and ends.

    A step shorter than the plan, as the last of an epoch, is cut in the plan's proportions.
    """
    if num_samples != sum(shares):
        weight = np.array(shares, dtype=np.float64)
        upper = np.where(weight > 0, num_samples, 0)
        none = np.zeros(len(shares), dtype=np.int64)
        shares = in_proportion(np.maximum(weight, 1e-9), num_samples, none, upper).tolist()
    ends = np.cumsum(shares).tolist()
    return [(end - share, end) for end, share in zip(ends, shares, strict=True)]
