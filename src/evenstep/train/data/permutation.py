"""Orders of a dataset that are computed from seed, epoch and position, without drawing them whole.

A large dataset is permuted by a Feistel network: a keyed bijection of the numbers below a power of
two, walked along until it hits a number below the length (less than two tries on average). It is
computed in chunks, so an order of any length takes a constant amount of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from evenstep.types import IntArray

DRAWN_WHOLE = 2**20  # the largest permutation that is drawn as a whole
CHUNK = 2**16  # positions computed at a time
NUM_ROUNDS = 8
CACHED = 4  # chunks: batches may cross a border, and be asked for again by a new generation

U64 = NDArray[np.uint64]


class Computed:
    """Samples of a dataset of known length, chunk by chunk: `compute(epoch, begin, end)`."""

    def __init__(
        self, length: int, compute: Callable[[int, int, int], IntArray], *, kind: str, chunk: int
    ) -> None:
        self.length, self.kind = length, kind
        self._chunk = max(1, min(chunk, length))

        def numbered(epoch: int, number: int) -> IntArray:
            begin = number * self._chunk
            return compute(epoch, begin, min(begin + self._chunk, length))

        self._numbered = lru_cache(maxsize=CACHED)(numbered)

    def end(self, epoch: int, begin: int, end: int) -> int:
        return min(end, self.length)

    def items(self, epoch: int, begin: int, end: int) -> list[int]:
        found: list[int] = []
        while begin < end:
            number, offset = divmod(begin, self._chunk)
            part = self._numbered(epoch, number)[offset : offset + end - begin]
            found += part.tolist()
            begin += len(part)
        return found

    def digest(self, epoch: int, begin: int, end: int) -> int:
        return 0  # seed and length are compared before training

    def forget(self, epoch: int, begin: int) -> None:
        """Nothing to do: the cache is bounded."""


def sequential(length: int) -> Computed:
    """The order of the dataset."""

    def compute(epoch: int, begin: int, end: int) -> IntArray:
        return np.arange(begin, end, dtype=np.int64)

    return Computed(length, compute, kind="", chunk=CHUNK)


def shuffled(length: int, seed: int) -> Computed:
    """A permutation for each epoch."""
    if length > DRAWN_WHOLE:
        return keyed(length, seed)

    def compute(epoch: int, begin: int, end: int) -> IntArray:
        return np.random.default_rng((seed, epoch)).permutation(length)

    return Computed(length, compute, kind="", chunk=length)


def keyed(length: int, seed: int) -> Computed:
    """A permutation for each epoch, in constant memory."""

    def compute(epoch: int, begin: int, end: int) -> IntArray:
        keys = _keys(seed, epoch, NUM_ROUNDS)
        return _permute(np.arange(begin, end, dtype=np.uint64), length, keys).astype(np.int64)

    return Computed(length, compute, kind="by a Feistel network", chunk=CHUNK)


def replaced(length: int, seed: int) -> Computed:
    """Independent draws with replacement, as many per epoch as the dataset has samples."""

    def compute(epoch: int, begin: int, end: int) -> IntArray:
        (key,) = _keys(seed, epoch, 1)
        drawn = _mix(np.arange(begin, end, dtype=np.uint64) ^ key)
        return (drawn % np.uint64(length)).astype(np.int64)  # biased by length / 2**64

    return Computed(length, compute, kind="with replacement", chunk=CHUNK)


def _keys(seed: int, epoch: int, num: int) -> U64:
    words = np.random.SeedSequence((seed, epoch)).generate_state(num, np.uint64)
    return words.astype(np.uint64)


def _permute(numbers: U64, length: int, keys: U64) -> U64:
    """A bijection of the numbers below `length`."""
    bits = (length - 1).bit_length()
    found = _feistel(numbers, bits, keys)
    while len(outside := np.flatnonzero(found >= length)):
        found[outside] = _feistel(found[outside], bits, keys)
    return found


def _feistel(numbers: U64, bits: int, keys: U64) -> U64:
    """A bijection of the numbers of so many bits: each round changes one half by the other."""
    low_bits = np.uint64(bits - bits // 2)
    high_mask = np.uint64((1 << bits // 2) - 1)
    low_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = numbers >> low_bits, numbers & low_mask
    for i, key in enumerate(keys):
        if i % 2:
            low = low ^ (_mix(high ^ key) & low_mask)
        else:
            high = high ^ (_mix(low ^ key) & high_mask)
    return high << low_bits | low


def _mix(numbers: U64) -> U64:
    """SplitMix64's output function: every input bit changes every output bit half of the time."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)  # arrays wrap around
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)
