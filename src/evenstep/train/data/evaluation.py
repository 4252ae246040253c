"""Evaluation: each worker evaluates its part of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler


class PartSampler(Sampler[int]):
    """The indices of this worker's part, for the roster at the beginning of the loop.

    `enter` makes this worker join a generation; `part_of` returns the begin and end of its part of
    so many samples.
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
        begin, end = self._part_of(self._length)
        if self._shuffle:
            return iter((begin + torch.randperm(end - begin)).tolist())
        return iter(range(begin, end))

    def __len__(self) -> int:
        begin, end = self._part_of(self._length)
        return end - begin
