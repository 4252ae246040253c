"""An epoch's batches for Trainer's loop, by number and fetched lazily."""

from __future__ import annotations

from typing import Any

import transformers.trainer

from evenstep.adapters.epoch import NOTHING, Epoch, MovedError
from evenstep.train.data.loader import Loader


class Placeholder(dict[str, Any]):
    """Lazy batch: filled when it is trained on."""

    taken: Any = None  # the batch, if the loader has handed it out already
    window = 1  # batches whose gradients accumulate with it, itself included


class TrainerBatches:
    """The DataLoader that Trainer sees. Call `begin` before each of its epochs."""

    def __init__(self, loader: Loader, accumulate: int) -> None:
        self._loader, self._accumulate = loader, accumulate
        self._epoch = Epoch(loader)

    def begin(self, epoch: int) -> int:
        """Begin an epoch, or continue it after a move; returns the number of its first batch."""
        self._epoch.begin(epoch)
        self._expected = self._loader.next_index if self._loader.epoch == epoch else 0
        return self._expected

    def take_window(self, num_batches: int) -> list[Placeholder]:
        """The batches of a window, without those that others took before this worker joined."""
        num_before = self._expected % self._accumulate
        window = [Placeholder() for _ in range(num_batches - num_before)]
        for batch in window:
            batch.window = num_batches
        window[0].taken = next(self)
        return window

    def __iter__(self) -> TrainerBatches:
        return self

    def __next__(self) -> Any:
        """The next batch. Raises `MovedError` if the run has advanced past this loop."""
        batch = self._epoch.take(lambda: self._loader.index != self._expected)
        if batch is NOTHING:
            raise MovedError
        self._expected += 1
        return batch


class KeepsPosition:
    """While it is entered, `skip_first_batches` leaves loaders as they are.

    Trainer would wrap its loader to skip batches of an epoch that is continued;
    `TrainerBatches` is where the run is anyway.
    """

    def __enter__(self) -> None:
        self._original = transformers.trainer.skip_first_batches
        transformers.trainer.skip_first_batches = lambda loader, num_batches: loader

    def __exit__(self, *_: object) -> None:
        transformers.trainer.skip_first_batches = self._original
