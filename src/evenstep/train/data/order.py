"""Which samples a step trains on, and which of them each rank gets.

All workers follow the same permutation of the dataset. A step takes the next global batch of it,
and the plan only says how that batch is split. So every sample is used exactly once per epoch,
whatever plans there were, even if the global batch grows with the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from evenstep.decide.split import in_proportion
from evenstep.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order in which a dataset is used."""

    length: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that must be equal on all workers."""
        return asdict(self)

    def permutation(self, epoch: int) -> IntArray:
        """The sample indices of an epoch, in the same order on every machine."""
        if not self.shuffle:
            return np.arange(self.length, dtype=np.int64)
        return np.random.default_rng((self.seed, epoch)).permutation(self.length)

    def end(self, begin: int, batch: int) -> int:
        """The end of the step that begins at a sample; `begin` itself if the epoch is over."""
        if self.drop_last and begin + batch > self.length:
            return begin
        return min(begin + batch, self.length)

    def cut(self, begin: int, shares: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
        """Where the step at a sample ends, and each rank's range of it, counted from `begin`."""
        end = self.end(begin, sum(shares))
        return end, rank_ranges(end - begin, shares) if end > begin else []

    def num_steps(self, batch: int) -> int:
        """Steps per epoch with this global batch."""
        num_full, remainder = divmod(self.length, batch)
        return num_full + (1 if remainder and not self.drop_last else 0)


def rank_ranges(num_samples: int, shares: Sequence[int]) -> list[tuple[int, int]]:
    """The begin and end of each rank's part of a step's samples.

    A step shorter than the plan, such as the last of an epoch, is split in the plan's proportions.
    """
    if num_samples != sum(shares):
        weight = np.array(shares, dtype=np.float64)
        upper = np.where(weight > 0, num_samples, 0)
        lower = np.zeros(len(shares), dtype=np.int64)
        shares = in_proportion(np.maximum(weight, 1e-9), num_samples, lower, upper).tolist()
    ends = np.cumsum(shares).tolist()
    return [(end - share, end) for end, share in zip(ends, shares, strict=True)]
