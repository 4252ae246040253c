"""Batches by step number: each worker's share of the one order, cut by the plan in force."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from evenstep.errors import ConfigError
from evenstep.train.order import Order, cut
from evenstep.train.pulse import MOST_SAMPLES

if TYPE_CHECKING:
    from evenstep.train.session import Session

Weight = Callable[[Any], float]


class ShareSampler(Sampler[list[int]]):
    """The indices of this worker's share, step by step, from the cursor on.

    A worker without a share in a step gets one stand-in sample that counts nothing, so that the
    user's loop never meets an empty batch.
    """

    def __init__(
        self, order: Order, shares_at: Callable[[int], tuple[int, ...]], rank: int
    ) -> None:
        self.order, self.rank = order, rank
        self.epoch, self.step = 0, 0  # the step within the epoch to begin at
        self._shares_at = shares_at

    def __iter__(self) -> Iterator[list[int]]:
        permutation = self.order.permutation(self.epoch)
        first = self.epoch * self.order.num_steps
        for step in range(self.step, self.order.num_steps):
            begin, end = self.order.slice(step)
            low, high = cut(end - begin, self._shares_at(first + step))[self.rank]
            share = permutation[begin + low : begin + high]
            yield (share if len(share) else permutation[begin : begin + 1]).tolist()

    def __len__(self) -> int:
        return self.order.num_steps - self.step


class Loader:
    """What `session.loader` returns: iterate it once an epoch."""

    def __init__(
        self,
        session: Session,
        dataset: Dataset[Any],
        *,
        batch: int,
        weight: Weight | None,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        **options: Any,
    ) -> None:
        check_dataset(dataset, batch, options)
        self._session, self._weight = session, weight
        if session.probe is not None:
            dataset, options = session.probe.watch_data(dataset, options)
        length = len(dataset)  # type: ignore[arg-type]
        self.order = Order(
            length=length, batch=batch, seed=seed, shuffle=shuffle, drop_last=drop_last
        )
        self.sampler = ShareSampler(self.order, session.shares_at, session.rank)
        self._loader = DataLoader(dataset, batch_sampler=self.sampler, **options)
        workers = self._loader.num_workers
        self.prefetched = workers * (self._loader.prefetch_factor or 0)

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self.order.num_steps

    def __iter__(self) -> Iterator[Any]:
        session, steps = self._session, self.order.num_steps
        session.enter()
        epoch = session.step // steps
        first, last = epoch * steps, (epoch + 1) * steps
        cut_for = 0
        batches: Iterator[Any] = iter(())
        while session.step < last:
            generation = session.settle()
            step = session.step
            if step >= last:
                break
            if generation != cut_for:  # what is prefetched was cut for another roster
                self.sampler.rank = session.rank
                self.sampler.epoch, self.sampler.step = epoch, step - first
                cut_for, batches = generation, iter(self._loader)
            batch = next(batches)
            begin, end = self.order.slice(step - first)
            low, high = cut(end - begin, session.shares_at(step))[session.rank]
            if session.probe is not None:
                batch = session.probe.begin_step(batch, high - low)
            weight = float(high - low)
            if self._weight is not None and high > low:
                weight = float(self._weight(batch))
            session.begin_step(step, samples=high - low, weight=weight, total=end - begin)
            yield batch
            session.end_step(step)
        next(batches, None)  # lets loader workers end as they like to
        session.end_epoch(last - 1)

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands; the session keeps epoch and cursor."""
        return {"seed": self.order.seed, "batch": self.order.batch, "length": self.order.length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse to go on with another order than was begun with."""
        if state != self.state_dict():
            raise ConfigError("loader", f"was begun with {state}, now {self.state_dict()}")


def check_dataset(dataset: Any, batch: int, options: dict[str, Any]) -> None:
    """Refuse at once what cannot be supported, with the way out."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            "dataset",
            "has no length, so its samples cannot be shared out exactly once; "
            "give a map-style dataset with __len__ and __getitem__",
        )
    if batch < 1:
        raise ConfigError("batch", f"must be 1 or more, got {batch}")
    if batch > MOST_SAMPLES:
        raise ConfigError("batch", f"must be at most {MOST_SAMPLES}, got {batch}")
    if len(dataset) < batch:
        raise ConfigError(
            "batch", f"{batch} is more than the {len(dataset)} samples of the dataset; lower it"
        )
    ours = {"batch_size", "sampler", "batch_sampler"} & options.keys()
    if ours:
        raise ConfigError(
            min(ours), "is evenstep's to choose; give the global batch as batch=..., drop the rest"
        )
