"""A dataset walked through by all workers together, each its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler


class PartSampler(Sampler[int]):
    """The indices of this worker's part, as the roster is when the loop over them begins.

    `enter` makes this worker one of a roster; `part_of` says from where to where its part of so
    many samples goes.
    """

    def __init__(
        self,
        length: int,
        enter: Callable[[], None],
        part_of: Callable[[int], tuple[int, int]],
        *,
        shuffle: bool,
    ) -> None:
        self._length, self._enter, self._part_of = length, enter, part_of
        self._shuffle = shuffle

    def __iter__(self) -> Iterator[int]:
        self._enter()
        low, high = self._part_of(self._length)
        if self._shuffle:
            return iter((low + torch.randperm(high - low)).tolist())
        return iter(range(low, high))

    def __len__(self) -> int:
        low, high = self._part_of(self._length)
        return high - low
