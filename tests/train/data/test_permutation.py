"""Computed orders: each sample once, in an order of its own for each epoch, at any length."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from evenstep.train.data.permutation import (
    CHUNK,
    DRAWN_WHOLE,
    Computed,
    keyed,
    replaced,
    sequential,
    shuffled,
)

HUGE = 9_000_000_000
SMALL_P = 1e-6  # one test in a million fails by chance; all of them are the same every time


def whole(samples: Computed, epoch: int = 0) -> list[int]:
    return samples.items(epoch, 0, samples.length)


LENGTHS = sorted(
    {1, 2, 3, 5, 97, 7919, CHUNK + 1} | {2**k + d for k in (3, 8, 16) for d in (-1, 0, 1)}
)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_sample_comes_once(length: int) -> None:
    for order in (shuffled(length, seed=1), keyed(length, seed=1), sequential(length)):
        assert sorted(whole(order, epoch=3)) == list(range(length))


@given(
    length=st.integers(1, 3 * CHUNK),
    bounds=st.tuples(st.integers(0, 3 * CHUNK), st.integers(0, 500)),
    make=st.sampled_from([keyed, replaced, shuffled]),
)
def test_a_part_is_the_same_however_it_is_asked_for(
    length: int, bounds: tuple[int, int], make: Callable[[int, int], Computed]
) -> None:
    begin = min(bounds[0], length)
    end = min(begin + bounds[1], length)
    one_by_one = make(length, 5)
    expected = [one_by_one.items(2, i, i + 1)[0] for i in range(begin, end)]
    assert make(length, 5).items(2, begin, end) == expected


def test_a_small_dataset_has_the_order_that_it_always_had() -> None:
    expected = np.random.default_rng((7, 3)).permutation(1000).tolist()
    assert whole(shuffled(1000, seed=7), epoch=3) == expected
    assert shuffled(DRAWN_WHOLE, seed=7).kind == ""
    assert shuffled(DRAWN_WHOLE + 1, seed=7).kind == "by a Feistel network"


@pytest.mark.parametrize("make", [keyed, shuffled, replaced])
def test_epochs_and_seeds_have_orders_of_their_own(make: Callable[[int, int], Computed]) -> None:
    orders = [whole(make(500, seed), epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    agreeing = sum(a == b for a, b in zip(orders[0], orders[1], strict=True))
    assert agreeing < 10  # one is expected


@pytest.mark.parametrize("length", [60, 97])
def test_every_sample_comes_at_every_position_alike(length: int) -> None:
    orders = np.array([whole(keyed(length, seed)) for seed in range(600)])
    for position in (0, 1, length // 2, length - 1):
        assert chisquare(np.bincount(orders[:, position], minlength=length)).pvalue > SMALL_P


def test_neighbours_and_epochs_are_independent() -> None:
    """Parts of the dataset that pairs of samples come from: one after the other, or an epoch on."""
    length = DRAWN_WHOLE + 7
    order = shuffled(length, seed=0)
    first, second = (np.array(order.items(epoch, 0, 2 * CHUNK)) * 16 // length for epoch in (0, 1))
    for a, b in ((first[:-1], first[1:]), (first, second)):
        assert chisquare(np.bincount(a * 16 + b, minlength=256)).pvalue > SMALL_P


def test_steps_of_a_large_order_are_spread_over_the_dataset() -> None:
    """Where samples of a batch lie, and how far apart neighbours are."""
    drawn = np.array(keyed(HUGE, seed=0).items(0, 5 * CHUNK - 3, 6 * CHUNK))
    assert chisquare(np.bincount(drawn * 64 // HUGE, minlength=64)).pvalue > SMALL_P
    apart = np.diff(drawn) % HUGE
    assert chisquare(np.bincount(apart * 64 // HUGE, minlength=64)).pvalue > SMALL_P
    assert len(set(drawn.tolist())) == len(drawn)


def test_drawing_with_replacement_is_uniform_and_repeats_samples() -> None:
    drawn = whole(replaced(CHUNK * 2, seed=3))
    num_different = len(set(drawn))
    assert abs(num_different / len(drawn) - (1 - np.exp(-1))) < 0.01
    counts = np.bincount(np.array(drawn) * 64 // (2 * CHUNK), minlength=64)
    assert chisquare(counts).pvalue > SMALL_P


@pytest.mark.parametrize("make", [shuffled, replaced])
def test_nine_billion_samples_take_constant_memory(make: Callable[[int, int], Computed]) -> None:
    order = make(HUGE, 0)
    tracemalloc.start()
    try:
        for position in range(0, HUGE, HUGE // 20):
            part = order.items(1, position, position + 512)
            assert len(part) == 512
            assert max(part) < HUGE
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
