"""Random numbers that do not depend on what the script has drawn before, and digests of values."""

from __future__ import annotations

import random  # noqa: TID251 - only seeded here: users' datasets and samplers draw from it
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

DIGEST_LIMIT = 2**24  # numbers below travel exactly in single precision


class RandomState:
    """States of the global generators of torch, Python and NumPy, beginning with a seed."""

    def __init__(self, seed: int) -> None:
        with seeded(seed):
            self._states = _get()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within it, the global generators continue from here; then the script's return."""
        with _kept():
            _set(self._states)
            try:
                yield
            finally:
                self._states = _get()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all global generators, and restore them afterwards."""
    with _kept():
        reseed(seed)
        yield


def reseed(seed: int) -> None:
    """Seed the global generators of torch, Python and NumPy, but not those of cards."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_of(*numbers: int) -> int:
    """One seed for several numbers, such as a run's seed and an epoch."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint32)[0])


def digest(value: Any) -> str:
    """A hash of a value's content. Of objects of unknown types only the type counts."""
    hasher = blake2b(digest_size=8)

    def update(part: Any) -> None:
        hasher.update(type(part).__name__.encode())
        if isinstance(part, torch.Tensor) and part.layout == torch.strided:
            hasher.update(f"{part.dtype}{tuple(part.shape)}".encode())
            flat = part.detach().cpu().contiguous().view(-1)
            hasher.update(flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(part, Mapping):
            update(list(part.items()))
        elif isinstance(part, list | tuple):
            for item in part:
                update(item)
        elif hasattr(part, "tobytes"):  # arrays, images
            hasher.update(f"{getattr(part, 'dtype', '')}{getattr(part, 'shape', '')}".encode())
            hasher.update(part.tobytes())
        elif isinstance(part, str | bytes | int | float | complex):
            hasher.update(repr(part).encode())

    update(value)
    return hasher.hexdigest()


def small_digest(value: Any) -> int:
    """The digest as a number that travels in the pulse; never 0."""
    return 1 + int(digest(value), 16) % (DIGEST_LIMIT - 1)


@contextmanager
def _kept() -> Iterator[None]:
    states = _get()
    try:
        yield
    finally:
        _set(states)


def _get() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set(states: tuple[Any, Any, torch.Tensor]) -> None:
    python_state, numpy_state, torch_state = states
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
