"""Which samples a step trains on, and which of them each rank gets.

All workers follow the same samples in the same order. A step takes the next global batch of them,
and the plan only says how that batch is split. So every sample is used exactly once per epoch,
whatever plans there were, even if the global batch grows with the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from evenstep.decide.split import in_proportion


class Samples(Protocol):
    """Which sample comes at which position of an epoch: the same on all workers."""

    @property
    def kind(self) -> str:
        """The kind of order, for people; empty for the dataset's own and for whole permutations."""

    @property
    def length(self) -> int | None:
        """Samples in an epoch; None: not known before its end."""

    def end(self, epoch: int, begin: int, end: int) -> int:
        """`end`, or the epoch's length if that is less; it has at least `begin` samples."""

    def items(self, epoch: int, begin: int, end: int) -> list[Any]:
        """Indices into the dataset, or samples, at positions that the epoch has."""

    def digest(self, epoch: int, begin: int, end: int) -> int:
        """A number that is equal on all workers if their orders are; 0: nothing to compare.

        The digest of an empty range must be the same after a resume.
        """

    def forget(self, epoch: int, begin: int) -> None:
        """Nobody will ask for earlier positions again."""


class Order:
    """The order in which samples are used, cut into steps."""

    def __init__(
        self, samples: Samples, *, seed: int = 0, shuffle: bool = False, drop_last: bool = False
    ) -> None:
        self.samples, self.drop_last = samples, drop_last
        self._seed, self._shuffle = seed, shuffle

    @property
    def length(self) -> int | None:
        """Samples in an epoch; None: not known before its end."""
        return self.samples.length

    @property
    def stated_length(self) -> int | None:
        """The epoch's length, or what a stream says its length is: steps are not cut by it."""
        return self.length if self.length is not None else getattr(self.samples, "stated", None)

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that must be equal on all workers."""
        return {
            "length": self.length or 0,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self.drop_last,
            "order": self.samples.kind,
        }

    def __str__(self) -> str:
        length = "a stream" if self.length is None else f"epochs of {self.length} samples"
        shuffled = f"shuffled with seed {self._seed}" if self._shuffle else ""
        how = [part for part in (shuffled, self.samples.kind) if part]
        return ", ".join([length, *(how or ["not shuffled"])])

    def end(self, epoch: int, begin: int, batch: int) -> int:
        """The end of the step that begins at a sample; `begin` itself if the epoch is over."""
        end = self.samples.end(epoch, begin, begin + batch)
        return begin if self.drop_last and end < begin + batch else end

    def cut(
        self, epoch: int, begin: int, shares: Sequence[int]
    ) -> tuple[int, list[tuple[int, int]]]:
        """Where the step at a sample ends, and each rank's range of it, counted from `begin`."""
        end = self.end(epoch, begin, sum(shares))
        return end, rank_ranges(end - begin, shares) if end > begin else []

    def num_steps(self, batch: int) -> int:
        """Steps per epoch with this global batch."""
        length = self.stated_length
        if length is None:
            raise TypeError(
                "a loader over a stream has no len(): its length is unknown until it ends. Give "
                "session.loader(..., steps=...) for loops of so many steps"
            )
        num_full, remainder = divmod(length, batch)
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
