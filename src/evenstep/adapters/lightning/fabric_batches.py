"""DataLoaders as Fabric gets them: to train on by all workers together, or to evaluate by each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from evenstep.train.data.loader import Loader


class Trains(Protocol):
    """What batches ask of the strategy."""

    @property
    def trains(self) -> bool: ...
    def train_on(self, batches: FabricBatches) -> Iterator[Any]: ...
    def evaluate_whole(self, batches: FabricBatches) -> Iterator[Any]: ...
    def position(self, batches: FabricBatches) -> dict[str, Any]: ...


class FabricBatches:
    """What Fabric gets for a DataLoader: to train on by all workers, or to evaluate by each.

    Its state is the position in the data, if it is trained on.
    """

    def __init__(self, plain: Any, strategy: Trains) -> None:
        self.plain, self._strategy = plain, strategy
        self.dataset, self.batch_size, self.drop_last = (
            plain.dataset,
            plain.batch_size,
            plain.drop_last,
        )
        self.loaded: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.plain)

    def __iter__(self) -> Iterator[Any]:
        strategy = self._strategy
        return strategy.train_on(self) if strategy.trains else strategy.evaluate_whole(self)

    def state_dict(self) -> dict[str, Any]:
        return self._strategy.position(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state or None


class NumberedBatches:
    """A DataLoader as Fabric returned it, with the number of the batch in hand."""

    def __init__(self, batches: Any, loader: Loader) -> None:
        self._batches, self._loader = batches, loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    @property
    def index(self) -> int:
        return self._loader.index
