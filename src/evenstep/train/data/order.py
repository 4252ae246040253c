"""Which samples a step trains on, and which of them are whose.

All workers walk one permutation of the dataset. A step takes the next global batch of it, however
many workers there are; the plan only says where that is cut. So every sample is used exactly once
an epoch under any history of plans, also where the global batch grows with the workers.
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
    """The order of one dataset."""

    length: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """What all workers must have alike."""
        return asdict(self)

    def permutation(self, epoch: int) -> IntArray:
        """The order of an epoch: the same on every machine."""
        if not self.shuffle:
            return np.arange(self.length, dtype=np.int64)
        return np.random.default_rng((self.seed, epoch)).permutation(self.length)

    def end(self, begin: int, batch: int) -> int:
        """Where the step that begins at a sample ends; `begin` itself if the epoch is over."""
        if self.drop_last and begin + batch > self.length:
            return begin
        return min(begin + batch, self.length)

    def cut(self, begin: int, shares: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
        """Where the step at a sample ends, and each rank's range of it, counted from `begin`."""
        end = self.end(begin, sum(shares))
        return end, cut(end - begin, shares) if end > begin else []

    def num_steps(self, batch: int) -> int:
        """Steps in an epoch of one global batch."""
        whole, rest = divmod(self.length, batch)
        return whole + (1 if rest and not self.drop_last else 0)


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
