"""The script's own samplers: weighted, over a subset, bucketed by length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from functools import lru_cache
from operator import index
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

from evenstep.errors import ConfigError
from evenstep.train.data.random_state import seed_of, seeded, small_digest
from evenstep.types import IntArray

MOST = 2**63  # samples of a dataset, that an index counts


class Sampled:
    """The order of a sampler, or of `sampler(epoch)`, drawn whole for each epoch.

    It must depend on the epoch and random numbers only, so that a worker that joins in the third
    epoch draws what the others have. Random numbers are seeded by epoch: the global generators,
    and a torch sampler's own. Workers compare digests of what they drew in every step.
    """

    def __init__(self, sampler: Any, *, seed: int, batch: int) -> None:
        self._sampler, self._seed, self._batch = sampler, seed, batch
        self._gives_batches = False
        _check(sampler)
        self.kind = f"by {_name(sampler)}"
        self._epoch = lru_cache(maxsize=2)(self._draw)
        self.length = 0
        self.length = len(self._epoch(0)[0])

    def check_whole_batches(self) -> None:
        """Refuse a short last batch: where passes go on, the batches after it would be cut anew."""
        left = self.length % self._batch
        if self._gives_batches and left:
            raise ConfigError(
                "sampler",
                f"its last batch has {left} of {self._batch} samples, so with steps=... those "
                "after it would not be the sampler's. Give it drop_last=True, or leave out steps",
            )

    def end(self, epoch: int, begin: int, end: int) -> int:
        return min(end, self.length)

    def items(self, epoch: int, begin: int, end: int) -> list[int]:
        found: list[int] = self._epoch(epoch)[0][begin:end].tolist()
        return found

    def digest(self, epoch: int, begin: int, end: int) -> int:
        return self._epoch(epoch)[1]

    def forget(self, epoch: int, begin: int) -> None:
        """Nothing to do: an epoch is drawn whole."""

    def _draw(self, epoch: int) -> tuple[IntArray, int]:
        seed = seed_of(self._seed, epoch)
        with seeded(seed):
            drawn = self._indices(epoch, seed)
        if not len(drawn):
            raise ConfigError("sampler", f"gave no samples for epoch {epoch}")
        if self.length and len(drawn) != self.length:
            raise ConfigError(
                "sampler",
                f"gave {len(drawn)} samples for epoch {epoch} and {self.length} for epoch 0; it "
                "must give as many for each",
            )
        return drawn, small_digest(drawn)

    def _indices(self, epoch: int, seed: int) -> IntArray:
        sampler = self._sampler
        if not isinstance(sampler, Iterable):
            return self._array(sampler(epoch))
        part: Any = sampler
        while part is not None:  # a BatchSampler has a sampler inside
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
            if hasattr(part, "generator"):
                part.generator = torch.Generator().manual_seed(seed)
            part = getattr(part, "sampler", None)
        return self._array(sampler)

    def _array(self, drawn: Any) -> IntArray:
        if isinstance(drawn, torch.Tensor):
            drawn = drawn.cpu()
            drawn = (drawn.double() if drawn.is_floating_point() else drawn).numpy()
        if isinstance(drawn, np.ndarray):
            return _indices_in(drawn)
        drawn = list(drawn)
        if drawn and isinstance(drawn[0], list | tuple):
            self._gives_batches, drawn = True, self._flatten(drawn)
        try:
            if drawn and isinstance(drawn[0], bool):  # a mask; Python would count it as 0 and 1
                raise TypeError
            return np.fromiter(map(index, drawn), dtype=np.int64, count=len(drawn))
        except (TypeError, ValueError, OverflowError):
            odd = next(each for each in drawn if not _is_index(each))
            raise _no_index(odd) from None

    def _flatten(self, batches: list[Any]) -> list[Any]:
        """The samples of a BatchSampler's batches, which must be the global ones."""
        sizes = {len(batch) for batch in batches}
        if {len(batch) for batch in batches[:-1]} - {self._batch} or max(sizes) > self._batch:
            raise ConfigError(
                "sampler",
                f"gives batches of {min(sizes)} to {max(sizes)} samples, but steps train on the "
                f"global batch, {self._batch or 'which grows with the workers'}; give it that "
                "batch size, or give the order of single samples",
            )
        return [index for batch in batches for index in batch]


def _check(sampler: Any) -> None:
    if isinstance(sampler, DistributedSampler):
        raise ConfigError(
            "sampler",
            "DistributedSampler splits the dataset by rank, which evenstep does; leave it out, or "
            "give a sampler of the whole dataset",
        )
    if isinstance(sampler, Iterator):
        raise ConfigError(
            "sampler", "is an iterator, which can be read once; give a sampler, or a list"
        )
    if isinstance(sampler, Iterable):
        if not isinstance(sampler, Sized):  # it may have no end
            raise ConfigError(
                "sampler",
                "has no length: an epoch's order is drawn as a whole. Give it __len__, or a "
                "function of the epoch that returns indices",
            )
    elif not callable(sampler):
        raise ConfigError(
            "sampler",
            f"expected a sampler or a function of the epoch that returns indices, got {sampler!r}",
        )


def _name(sampler: Any) -> str:
    return sampler.__name__ if hasattr(sampler, "__name__") else type(sampler).__name__


def _indices_in(drawn: NDArray[Any]) -> IntArray:
    """An array of indices; one of floats would be rounded, and a mask is none."""
    if drawn.size and drawn.dtype.kind not in "iu":
        raise _no_index(*drawn.reshape(-1)[:1].tolist())
    return drawn.astype(np.int64).reshape(-1)


def _is_index(value: Any) -> bool:
    try:
        return -MOST <= index(value) < MOST and not isinstance(value, bool)
    except (TypeError, ValueError):
        return False


def _no_index(value: Any) -> ConfigError:
    return ConfigError(
        "sampler",
        f"gave {value!r}, but each sample is the dataset's item at a whole number. Give indices: "
        "for keys, a dataset whose __getitem__ looks up its list of keys; for a mask, its nonzero "
        "positions",
    )
