"""Runs a plain script in one process, on the samples that evenstep would give it.

    python reference.py SCRIPT ARGS

Two ways to shuffle are not comparable, so samplers and `torch.randint(n, (k,))`, as in nanoGPT's
`get_batch`, draw what evenstep's loader draws. No other part of evenstep is used.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import RandomSampler, WeightedRandomSampler

from bench.matrix.script import run_script
from evenstep.train.data.permutation import replaced, shuffled
from evenstep.train.data.random_state import seed_of

SEED = 0


class _Epochs:
    """Numbers the loops over each sampler."""

    def __init__(self) -> None:
        self._known: dict[int, Iterator[int]] = defaultdict(count)

    def next(self, sampler: object) -> int:
        return next(self._known[id(sampler)])


def install_orders() -> None:
    """Replace torch's random orders by evenstep's."""
    epochs = _Epochs()
    draw_weighted = WeightedRandomSampler.__iter__
    randint, num_drawn = torch.randint, 0

    def permuted(self: Any) -> Iterator[int]:
        num = len(self.data_source)
        yield from shuffled(num, SEED).items(epochs.next(self), 0, num)

    def weighted(self: Any) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(seed_of(SEED, epochs.next(self)))
        yield from draw_weighted(self)

    def drawn(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal num_drawn
        if len(args) != 2 or options:  # with two bounds, or a generator: not the order of samples
            return randint(*args, **options)
        length, (num,) = args
        found = []
        for position in range(num_drawn, num_drawn + num):
            epoch, begin = divmod(position, length)
            found += replaced(length, SEED).items(epoch, begin, begin + 1)
        num_drawn += num
        return torch.tensor(found)

    patch.object(RandomSampler, "__iter__", permuted).start()
    patch.object(WeightedRandomSampler, "__iter__", weighted).start()
    patch.object(torch, "randint", drawn).start()


if __name__ == "__main__":
    install_orders()
    run_script(sys.argv[1], sys.argv[2:])
