"""Batches by step number: each worker's share of the one order, cut by the plan in force."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from evenstep.config import BatchSettings
from evenstep.errors import ConfigError, EvenstepError
from evenstep.train.data.order import Order, cut
from evenstep.train.reduce.pulse import MOST_SAMPLES

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
        self.epoch = self.begin = self.step = 0  # where to begin: a sample of an epoch, and a step
        self._shares_at = shares_at

    def __iter__(self) -> Iterator[list[int]]:
        permutation = self.order.permutation(self.epoch)
        begin, step = self.begin, self.step
        while True:
            shares = self._shares_at(step)
            end = self.order.end(begin, sum(shares))
            if end == begin:
                return
            low, high = cut(end - begin, shares)[self.rank]
            share = permutation[begin + low : begin + high]
            yield (share if len(share) else permutation[begin : begin + 1]).tolist()
            begin, step = end, step + 1


class Loader:
    """What `session.loader` returns: iterate it once an epoch.

    A loop that is left, by `break` say, has used what it was trained on: another one goes on with
    the samples that come next in the epoch. A batch without a backward pass comes again.
    """

    def __init__(
        self,
        session: Session,
        dataset: Dataset[Any],
        *,
        batch: BatchSettings,
        weight: Weight | None,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        **options: Any,
    ) -> None:
        check_dataset(dataset, batch.limit or batch.size, options)
        self._session, self._weight = session, weight
        self.batch = batch
        self.epoch = self.cursor = 0  # the epoch, and the sample of it, that comes next
        self._taken: tuple[int, int] | None = None  # the step in hand, and where it ends
        self._loops, self._was_left = 0, False
        if session.probe is not None:
            dataset, options = session.probe.watch_data(dataset, options)
        length = len(dataset)  # type: ignore[arg-type]
        self.order = Order(length=length, seed=seed, shuffle=shuffle, drop_last=drop_last)
        self.sampler = ShareSampler(self.order, session.shares_at, session.rank)
        self._loader = DataLoader(dataset, batch_sampler=self.sampler, **options)
        workers = self._loader.num_workers
        self.prefetched = workers * (self._loader.prefetch_factor or 0)

    def __len__(self) -> int:
        """Steps in an epoch of the present global batch."""
        return self.order.num_steps(self._session.batch)

    def __iter__(self) -> Iterator[Any]:
        session, order = self._session, self.order
        session.check_open("session.loader")
        session.enter()
        self.leave()
        self._loops, self._was_left = self._loops + 1, False
        loop = self._loops
        epoch, cut_for = self.epoch, 0
        batches: Iterator[Any] = iter(())
        while order.end(self.cursor, session.batch) > self.cursor:
            generation = session.settle(may_rest=True)
            if self.epoch != epoch:  # it was a spare meanwhile: the script asks for the epoch anew
                session.fall_behind()
                return
            step, shares = session.step, session.shares_at(session.step)
            begin, end = self.cursor, order.end(self.cursor, sum(shares))
            if end == begin:
                break  # others have taken the epoch's last step
            if generation != cut_for:  # what is prefetched was cut for another roster
                self.sampler.rank = session.rank
                self.sampler.epoch, self.sampler.begin, self.sampler.step = self.epoch, begin, step
                cut_for, batches = generation, iter(self._loader)
            session.begin_fetch()
            batch = next(batches)
            low, high = cut(end - begin, shares)[session.rank]
            if session.probe is not None:
                batch = session.probe.begin_step(batch, high - low)
            weight = float(high - low)
            if self._weight is not None and high > low:
                weight = float(self._weight(batch))
                if not 0 <= weight < math.inf:
                    raise EvenstepError(
                        f"weight=... gave {weight} for the batch of step {step}: what a mean loss "
                        "counts for, its number of tokens say, is finite and not negative"
                    )
            session.begin_step(step, samples=high - low, weight=weight, total=end - begin)
            self._taken = step, end
            try:
                yield batch
            except GeneratorExit:  # by `break`, by an error, or when memory is collected: who knows
                if loop == self._loops and self._taken is not None:
                    self._was_left = True
                    session.left()
                raise
            if loop != self._loops:
                raise EvenstepError(
                    "this loop over session.loader(...) was left for another one, and its samples "
                    "are used. Go on with the newest iterator alone."
                )
            self._end_step()
        next(batches, None)  # lets loader workers end as they like to
        # For whoever gets this state meanwhile: with a batch that has shrunk, what `drop_last`
        # leaves out might make a step again.
        self.cursor = order.length
        session.end_epoch()  # which may bring the state of others who are through it
        self.epoch, self.cursor = epoch + 1, 0

    @property
    def reached(self) -> int:
        """The sample that comes next, also where a loop was left and not gone on with yet."""
        if self._taken is not None and self._session.is_left_behind:
            return max(self.cursor, self._taken[1])
        return self.cursor

    def leave(self) -> None:
        """End the last step of a loop that is over, if its batch made one."""
        if self._taken is None:
            return
        if self._session.void or self._session.is_done:
            self._end_step()
        self._taken = None
        self._session.let_go_of_batch()

    def leave_epoch(self) -> None:
        """Begin the next epoch, if the last loop was left in the midst of this one."""
        if self._was_left and self.cursor:
            self.epoch, self.cursor = self.epoch + 1, 0
        self._was_left = False

    def _end_step(self) -> None:
        """The batch in hand has been used."""
        assert self._taken is not None
        (step, end), self._taken = self._taken, None
        self._session.end_step(step)
        self._session.let_go_of_batch()
        if self._session.step > step:
            self.cursor = max(self.cursor, end)  # others, whose state it got, may be further

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands."""
        return {**self._order(), "epoch": self.epoch, "cursor": self.reached}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there. Refuses another order than was begun with."""
        begun = {name: value for name, value in state.items() if name not in ("epoch", "cursor")}
        if begun != self._order():
            raise ConfigError("loader", f"was begun with {begun}, now {self._order()}")
        self.epoch, self.cursor = state["epoch"], state["cursor"]

    def _order(self) -> dict[str, Any]:
        batch = self.batch
        sizes = {"batch": batch.size, "per_worker": batch.per_worker, "limit": batch.limit}
        return {**self.order.facts, **sizes}


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
