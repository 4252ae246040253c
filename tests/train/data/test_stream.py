"""Streams: read alike by all workers, kept until nobody needs them, and begun anew anywhere."""

from __future__ import annotations

import random  # noqa: TID251 - as users' streams draw
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from evenstep.errors import EvenstepError
from evenstep.train.data.order import Order
from evenstep.train.data.position import DataPosition
from evenstep.train.data.repeated import Repeated
from evenstep.train.data.share_sampler import ShareSampler
from evenstep.train.data.stream import Stream


class Shuffling(IterableDataset[tuple[int, int]]):
    """Samples (epoch, number), shuffled in a small buffer by Python's global generator."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.num_read = length, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        buffer: list[int] = []
        for i in range(self.length):
            buffer.append(i)
            if len(buffer) > 4:
                yield self._take(buffer)
        while buffer:
            yield self._take(buffer)

    def _take(self, buffer: list[int]) -> tuple[int, int]:
        self.num_read += 1
        return self.epoch, buffer.pop(random.randrange(len(buffer)))


class Seekable:
    """A stream that can begin anywhere."""

    def __init__(self, length: int) -> None:
        self.length, self.num_read = length, 0

    def samples_from(self, epoch: int, begin: int) -> Iterator[tuple[int, int]]:
        for i in range(begin, self.length):
            self.num_read += 1
            yield epoch, i


STREAMS = st.sampled_from([Shuffling, Seekable])


def pieces(order: Order, shares: list[list[int]], epoch: int, rank: int) -> list[list[Any]]:
    sampler = ShareSampler(order, lambda step: tuple(shares[step % len(shares)]), rank)
    sampler.position = DataPosition(epoch=epoch)
    return list(sampler)


@given(
    kind=STREAMS,
    length=st.integers(1, 50),
    shares=st.lists(
        st.lists(st.integers(0, 7), min_size=2, max_size=2).filter(any), min_size=1, max_size=4
    ),
    epoch=st.integers(0, 2),
)
def test_the_ranks_together_use_every_sample_once(
    kind: Any, length: int, shares: list[list[int]], epoch: int
) -> None:
    used: list[tuple[int, int]] = []
    parts = [pieces(Order(Stream(kind(length), seed=1)), shares, epoch, rank) for rank in range(2)]
    for step, (a, b) in enumerate(zip(*parts, strict=True)):
        first, second = shares[step % len(shares)]
        used += {*(a if first else []), *(b if second else [])}
    assert sorted(used) == [(epoch, i) for i in range(length)]


@given(
    kind=STREAMS,
    length=st.integers(1, 50),
    asked=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9), st.booleans()), max_size=8),
    repeats=st.booleans(),
)
def test_samples_are_the_same_whenever_they_are_asked_for(
    kind: Any, length: int, asked: list[tuple[int, int, bool]], repeats: bool
) -> None:
    """In any order, as workers adopt states, with earlier ones forgotten or not."""
    whole = Stream(kind(length), seed=1, repeats=repeats).items(0, 0, 80)
    assert len(whole) == (80 if repeats else length)
    stream = Stream(kind(length), seed=1, repeats=repeats)
    for position, num, forgets in asked:
        begin = min(position, len(whole))
        end = stream.end(0, begin, begin + num)
        assert end == min(begin + num, len(whole))
        if begin < end:
            assert stream.items(0, begin, end) == whole[begin:end]
        if forgets:
            stream.forget(0, begin)


def test_only_samples_that_may_be_asked_for_again_are_kept() -> None:
    stream = Stream(Shuffling(1000), seed=1)
    for begin in range(0, 900, 10):
        stream.items(0, begin, begin + 30)
        stream.forget(0, begin)
        assert len(stream._kept) == 30


def test_a_stream_that_can_begin_anywhere_is_not_read_from_its_beginning() -> None:
    source = Seekable(1000)
    assert Stream(source, seed=0).items(3, 990, 1000) == [(3, i) for i in range(990, 1000)]
    assert source.num_read == 10


def test_passes_over_a_stream_follow_each_other_in_a_loop_of_so_many_steps() -> None:
    samples = Repeated(Stream(Shuffling(7), seed=0, repeats=True), steps=5, batch=4)
    assert samples.length == 20
    used = samples.items(0, 0, 20) + samples.items(1, 0, 8)
    assert [epoch for epoch, _ in used] == [0] * 7 + [1] * 7 + [2] * 7 + [3] * 7
    assert [sorted(i for e, i in used if e == epoch) for epoch in range(4)] == [list(range(7))] * 4


def test_digests_tell_samples_and_lengths_apart() -> None:
    def digest(source: Any, begin: int = 0, num: int = 4) -> int:
        return Stream(source, seed=0).digest(0, begin, begin + num)

    assert digest(Seekable(20)) == digest(Seekable(20)) != 0
    assert digest(Seekable(20)) != digest(Seekable(20), begin=4)
    assert digest(Seekable(7)) != digest(Seekable(8)) == digest(Seekable(9))  # of the next step
    assert digest(Seekable(7), num=0) == 0  # nothing was used yet
    assert digest(Seekable(7), begin=5, num=0) == digest(Seekable(9), begin=5, num=0)
    assert len({digest(Seekable(7), begin=i, num=0) for i in (5, 6, 7)}) == 3


@pytest.mark.parametrize("repeats", [False, True])
def test_a_stream_without_samples_is_an_error(repeats: bool) -> None:
    with pytest.raises(EvenstepError, match="no samples in epoch 0"):
        Stream(Shuffling(0), seed=0, repeats=repeats).end(0, 0, 5)
