"""Batches for a framework that owns the loop and may fall behind the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from evenstep.train.data.loader import Loader

NOTHING = object()


class MovedError(Exception):
    """The run advanced past this worker's loop while the worker was a spare."""


class Epoch:
    """The epoch that a framework's loop is in."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._number = -1
        self._batches: Iterator[Any] = iter(())
        self._returned: Any = NOTHING  # a batch in hand that was not the expected one

    def begin(self, number: int) -> None:
        """Begin an epoch, unless the loop is in it already."""
        if number != self._number:
            self._number, self._returned = number, NOTHING
            self._loader.set_epoch(number)
            self._batches = iter(self._loader)

    def take(self, has_moved: Callable[[], bool]) -> Any:
        """The next batch; `NOTHING` at the epoch's end.

        Raises `MovedError` if the run has moved by then: the batch is for another call.
        """
        batch, self._returned = self._returned, NOTHING
        if batch is NOTHING:
            batch = next(self._batches, NOTHING)
        if has_moved():
            self._returned = batch
            raise MovedError
        return batch
