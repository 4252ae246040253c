"""Samplers of one's own: the same order on all workers, refused where it would not be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from evenstep.errors import ConfigError
from evenstep.train.data.random_state import RandomState
from evenstep.train.data.sampled import Sampled

NUM, BATCH = 40, 8
WEIGHTS = [1.0] * 20 + [9.0] * 20


class ByLength(Sampler[int]):
    """Buckets of similar lengths, shuffled by the global generators of NumPy and torch."""

    def __iter__(self) -> Iterator[int]:
        lengths = np.random.permutation(NUM)
        buckets = np.argsort(lengths // 10).reshape(-1, 10)
        return (int(i) for bucket in torch.randperm(len(buckets)) for i in buckets[int(bucket)])

    def __len__(self) -> int:
        return NUM


SAMPLERS: list[Any] = [
    lambda: WeightedRandomSampler(WEIGHTS, NUM),
    lambda: WeightedRandomSampler(WEIGHTS, NUM, generator=torch.Generator()),
    lambda: SubsetRandomSampler(range(10, 30)),
    lambda: RandomSampler(range(NUM)),
    lambda: BatchSampler(RandomSampler(range(NUM), generator=torch.Generator()), BATCH, False),
    ByLength,
    lambda: lambda epoch: torch.randperm(NUM),
    lambda: lambda epoch: [(3 * i + epoch) % NUM for i in range(NUM)],
]


def items(samples: Sampled, epoch: int) -> list[int]:
    return samples.items(epoch, 0, samples.length)


@pytest.mark.parametrize("make", SAMPLERS)
def test_an_epochs_order_does_not_depend_on_what_was_drawn_before(make: Any) -> None:
    first = Sampled(make(), seed=1, batch=BATCH)
    orders = [items(first, epoch) for epoch in range(4)]
    np.random.random()
    torch.rand(3)
    joiner = Sampled(make(), seed=1, batch=BATCH)
    assert items(joiner, 3) == orders[3]
    assert joiner.digest(3, 0, 0) == first.digest(3, 0, 0)
    assert items(joiner, 1) == orders[1]
    assert len({tuple(order) for order in orders}) == 4
    assert len({first.digest(epoch, 0, 8) for epoch in range(4)}) == 4


def test_a_constant_order_may_be_a_list() -> None:
    assert items(Sampled([3, 1, 2], seed=0, batch=1), 5) == [3, 1, 2]


def test_drawing_leaves_the_scripts_random_numbers_alone() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    expected = torch.rand(1), np.random.random()
    torch.manual_seed(1)
    np.random.seed(1)
    items(Sampled(ByLength(), seed=1, batch=BATCH), 2)
    assert (torch.rand(1), np.random.random()) == expected


def test_a_random_state_continues_where_it_was() -> None:
    state, found = RandomState(4), []
    for _ in range(2):
        with state.installed():
            found.append(float(torch.rand(1)))
        torch.rand(5)
    with RandomState(4).installed():
        assert [float(torch.rand(1)) for _ in range(2)] == found


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


@pytest.mark.parametrize(
    ("sampler", "says"),
    [
        (DistributedSampler(TensorDataset(torch.zeros(4)), 2, 0), "splits the dataset by rank"),
        (iter([1, 2]), "can be read once"),
        (Endless(), "has no length"),
        (3, "expected a sampler or a function"),
        ([], "gave no samples for epoch 0"),
        (BatchSampler(range(NUM), 3, False), "gives batches of 1 to 3 samples"),
        ([[1, 2], [3]], "gives batches of 1 to 2 samples"),
        ([[0] * 8, [1] * 9], "gives batches of 8 to 9 samples"),
    ],
)
def test_what_has_no_common_order_is_refused(sampler: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Sampled(sampler, seed=0, batch=BATCH)


def test_epochs_of_different_lengths_are_refused() -> None:
    samples = Sampled(lambda epoch: range(5 + epoch), seed=0, batch=2)
    with pytest.raises(ConfigError, match="gave 7 samples for epoch 2 and 5 for epoch 0"):
        samples.items(2, 0, 5)
