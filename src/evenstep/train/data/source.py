"""The data that a script gives to `session.loader`: a dataset with an order, or a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from evenstep.config import BatchSettings
from evenstep.errors import ConfigError
from evenstep.strict import whole
from evenstep.train.data.order import Order, Samples
from evenstep.train.data.permutation import replaced, sequential, shuffled
from evenstep.train.data.repeated import Repeated
from evenstep.train.data.sampled import Sampled
from evenstep.train.data.stream import Readable, Stream
from evenstep.train.step import MAX_BATCH

Transform = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which samples to train on, and in which order: arguments of `session.loader`."""

    batch: BatchSettings
    seed: int = 0
    shuffle: bool | None = None  # None: True where that is possible
    drop_last: bool = False
    steps: int = 0  # in a loop; 0: until all samples were used
    replacement: bool = False
    sampler: Any = None
    transform: Transform | None = None  # of a stream's samples

    def order_of(self, dataset: Any) -> Order:
        """The order of a dataset's or stream's samples; refuses contradictory arguments."""
        self._check()
        refuse_loader(dataset, "batch")
        stream = is_stream(dataset)
        shuffle = self.shuffle is not False and self.sampler is None and not stream
        samples = self._stream(dataset) if stream else self._samples(dataset, shuffle)
        if self.steps:
            if isinstance(samples, Sampled):
                samples.check_whole_batches()
            samples = Repeated(samples, steps=self.steps, batch=self.batch.size)
        elif samples.length is not None and samples.length < self._largest:
            raise ConfigError(
                "batch",
                f"{self._largest} is more than the {samples.length} samples of the dataset; lower "
                "it, or give steps=...",
            )
        return Order(samples, seed=self.seed, shuffle=shuffle, drop_last=self.drop_last)

    @property
    def _largest(self) -> int:
        return self.batch.limit or self.batch.size

    def _check(self) -> None:
        whole("steps", self.steps, 0)
        if not 1 <= self._largest <= MAX_BATCH:
            bound = "1 or more" if self._largest < 1 else f"at most {MAX_BATCH}"
            raise ConfigError("batch", f"must be {bound}, got {self._largest}")
        if self.steps and not self.batch.size:
            raise ConfigError(
                "steps",
                "needs batch=...: with per_worker=... the samples of so many steps depend on the "
                "workers to come",
            )
        if self.sampler is not None and (self.shuffle or self.replacement):
            name = "shuffle" if self.shuffle else "replacement"
            raise ConfigError(name, "is up to the sampler; leave it out, or leave out sampler=...")
        if self.replacement and self.shuffle is False:
            raise ConfigError("replacement", "draws at random; leave out shuffle=False")

    def _samples(self, dataset: Any, shuffle: bool) -> Samples:
        check_dataset(dataset)
        if self.transform is not None:
            raise ConfigError("transform", "is for streams; a dataset has its own in __getitem__")
        if self.sampler is not None:
            return Sampled(self.sampler, seed=self.seed, batch=self.batch.size)
        if self.replacement:
            return replaced(len(dataset), self.seed)
        return shuffled(len(dataset), self.seed) if shuffle else sequential(len(dataset))

    def _stream(self, stream: Any) -> Samples:
        given = {"shuffle": self.shuffle, "replacement": self.replacement, "sampler": self.sampler}
        for name, value in given.items():
            if value:
                raise ConfigError(
                    name,
                    "is not possible with a stream, which is used in its own order; shuffle inside "
                    "of the stream, from a seed and its set_epoch(epoch)",
                )
        if isinstance(stream, Iterator):
            raise ConfigError(
                "dataset",
                "is an iterator, which can be read once, but workers that join begin anew; give an "
                "iterable whose __iter__ begins anew, or a function of the epoch that returns one",
            )
        return Stream(stream, seed=self.seed, repeats=self.steps > 0)


class Kept:
    """The dataset of a stream: "indices" are the samples themselves, to be transformed."""

    def __init__(self, transform: Transform | None) -> None:
        self._transform = transform

    def __getitem__(self, sample: Any) -> Any:
        return sample if self._transform is None else self._transform(sample)


def is_stream(dataset: Any) -> bool:
    """Whether samples can only be read one after the other."""
    if isinstance(dataset, IterableDataset | Readable):
        return True
    return (isinstance(dataset, Iterable) or callable(dataset)) and not hasattr(
        dataset, "__getitem__"
    )


def refuse_loader(dataset: Any, size: str) -> None:
    """Refuse a DataLoader, which would be read as a stream of batches."""
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            "dataset",
            f"is a {type(dataset).__name__}, whose batches would be taken for samples: give its "
            f"dataset, and {size}=...; its other options go along",
        )


def check_dataset(dataset: Any) -> None:
    """Refuse anything but a map-style dataset with samples."""
    refuse_loader(dataset, "batch_size")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError("dataset", "has no length: give one with __len__ and __getitem__")
    if not len(dataset):
        raise ConfigError("dataset", "has no samples")


def check_options(options: dict[str, Any]) -> None:
    """Refuse options of `DataLoader` that are evenstep's to choose."""
    if options.pop("batch_sampler", None) is not None:
        raise ConfigError(
            "batch_sampler",
            "give it as sampler=...: its order counts, and steps train on batch=... of it; its "
            "batches are the steps' if they have that size",
        )
    if options.pop("sampler", None) is not None:  # that of an evaluation
        raise ConfigError("sampler", "is evenstep's to choose; give a Subset of the dataset")
    if "batch_size" in options:
        raise ConfigError(
            "batch_size", "is evenstep's to choose; give the global batch as batch=..."
        )
