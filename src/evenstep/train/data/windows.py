"""Windows of batches whose gradients accumulate for one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from evenstep.errors import EvenstepError
from evenstep.train.data.loader import Loader


class Window:
    """The batches of one optimizer step: loop over it once, with a backward pass for each."""

    def __init__(
        self, loader: Loader, batches: Iterator[Any], first: Any, num_batches: int
    ) -> None:
        self._loader, self._batches = loader, batches
        self._first, self._num_batches = first, num_batches
        self._has_begun = False
        self._index = loader.index
        is_stream = loader.order.length is None
        self._num_read = loader.num_left(num_batches) if is_stream else 0

    def __len__(self) -> int:
        """Batches in this window: fewer at the end of an epoch."""
        return self._num_read or min(self._num_batches, len(self._loader) - self._index)

    def __iter__(self) -> Iterator[Any]:
        if self._has_begun:
            raise EvenstepError(
                "a window of session.accumulate was looped over a second time, but each of its "
                f"{len(self)} batches is handed out once. Do everything with a batch in one loop "
                "over the window: `for batch in window`."
            )
        self._has_begun = True
        return self._each()

    def _each(self) -> Iterator[Any]:
        yield self._first
        while True:
            while self._loader.repeat():
                yield self._loader.data
            # By number, not by count: this worker may have taken over another's state since.
            if (self._loader.index + 1) % self._num_batches == 0 or self._loader.is_last:
                return
            try:
                batch = next(self._batches)
            except StopIteration:
                return
            yield batch


def windows(loader: Loader, num_batches: int) -> Iterator[Window]:
    """An epoch in windows of so many batches."""
    batches = iter(loader)
    for first in batches:
        yield Window(loader, batches, first, num_batches)
