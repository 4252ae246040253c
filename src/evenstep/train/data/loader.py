"""Batches by step number: each worker's share of one common order, cut by the plan in force."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from evenstep.config import BatchSettings
from evenstep.decide.learning_rate import global_batch
from evenstep.errors import ConfigError, EvenstepError
from evenstep.train.data.order import Order
from evenstep.train.plan.plans import Plans
from evenstep.train.ports import Observer, Roster
from evenstep.train.step import MAX_BATCH, Batch, Step

Weight = Callable[[Any], float]


class ShareSampler(Sampler[list[int]]):
    """The indices of this worker's share, step by step, from a given position on.

    A worker without a share in a step gets a stand-in of one sample that counts for nothing, so
    that the user's loop never sees an empty batch.
    """

    def __init__(
        self, order: Order, shares_at: Callable[[int], tuple[int, ...]], rank: int
    ) -> None:
        self.order, self.rank = order, rank
        self.epoch = self.begin = self.step = 0  # where to begin: epoch, sample of it, and step
        self.batches: deque[Batch] = deque()  # one for each that was drawn
        self._shares_at = shares_at

    def __iter__(self) -> Iterator[list[int]]:
        order, epoch, batches = self.order, self.epoch, self.batches
        permutation = order.permutation(epoch)
        begin, step = self.begin, self.step
        while True:
            end, ranges = order.cut(begin, self._shares_at(step))
            if end == begin:
                return
            low, high = ranges[self.rank]
            position = epoch * order.length + begin
            batches.append(
                Batch(step=step, samples=high - low, total=end - begin, position=position)
            )
            share = permutation[begin + low : begin + high]
            yield (share if len(share) else permutation[begin : begin + 1]).tolist()
            begin, step = end, step + 1


class Loader:
    """What `session.loader` returns: iterate it once per epoch.

    Samples of a loop that was left, by `break` say, count as used if they were trained on; the next
    loop continues with the rest of the epoch. A batch without a backward pass comes again.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        step: Step,
        plans: Plans,
        roster: Roster,
        check_open: Callable[[str], None],
        end_epoch: Callable[[], None],
        batch: BatchSettings,
        weight: Weight | None,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        observer: Observer | None = None,
        **options: Any,
    ) -> None:
        check_dataset(dataset, batch.limit or batch.size, options)
        if not options.get("in_order", True):
            raise ConfigError(
                "in_order", "must be True: all workers train on the samples of the same step"
            )
        self._step, self._plans, self._roster = step, plans, roster
        self._check_open, self._end_epoch = check_open, end_epoch
        self._weight, self._observer = weight, observer
        self.batch = batch
        self.epoch = self.cursor = 0  # the epoch, and the sample of it, that comes next
        self._batch_end: int | None = None  # the sample at which the batch in hand ends
        self._num_loops, self._was_left = 0, False
        if observer is not None:
            dataset, options = observer.watch_data(dataset, options)
        length = len(dataset)  # type: ignore[arg-type]
        self.order = Order(length=length, seed=seed, shuffle=shuffle, drop_last=drop_last)
        self._sampler = ShareSampler(self.order, plans.shares_at, roster.rank)
        self._loader = DataLoader(dataset, batch_sampler=self._sampler, **options)
        self.prefetched = self._loader.num_workers * (self._loader.prefetch_factor or 0)

    def __len__(self) -> int:
        """Steps in an epoch of the present global batch."""
        return self.order.num_steps(self.global_batch)

    @property
    def global_batch(self) -> int:
        """Samples of the coming step, over all workers."""
        if self._plans:
            return sum(self._plans.shares_at(self._step.num_done))
        return global_batch(self.batch, self._roster.world)

    @property
    def num_used(self) -> int:
        """Samples of the whole job that are used, including those of a loop that was left."""
        return self.epoch * self.order.length + self._next_sample

    def __iter__(self) -> Iterator[Any]:
        step = self._step
        self._check_open("session.loader")
        self._roster.enter()
        self.leave()
        self._num_loops, self._was_left = self._num_loops + 1, False
        loop, epoch, cut_for = self._num_loops, self.epoch, 0
        batches: Iterator[Any] = iter(())
        while not self._is_over:
            generation = self._roster.settle(in_loop=True)
            if self.epoch != epoch:  # this worker was a spare meanwhile: session.epochs moves on
                self._roster.fall_behind()
                return
            if self._is_over:
                break  # others have taken the epoch's last step, or the batch has grown
            if generation != cut_for:  # prefetched batches were cut for another roster
                cut_for, batches = generation, self._restart()
            step.is_between, began_s = False, time.monotonic()
            batch = self._take(next(batches), began_s)
            try:
                yield batch
            except GeneratorExit:  # by `break`, an error, or the garbage collector
                if loop == self._num_loops and self._batch_end is not None:
                    self._was_left = True
                    step.leave()
                raise
            if loop != self._num_loops:
                raise EvenstepError(
                    "this loop over session.loader(...) was left for another one, which has used "
                    "its samples. Continue with the newest iterator only."
                )
            self._end_step()
        next(batches, None)  # lets loader processes shut down cleanly
        # For workers that adopt this state now: if the batch has shrunk, what `drop_last` leaves
        # out might make up a step again.
        self.cursor = self.order.length
        self._end_epoch()  # may load the state of workers that are in the next epoch already
        self.epoch, self.cursor = epoch + 1, 0

    @property
    def _is_over(self) -> bool:
        """Whether no further step fits into the epoch."""
        size = self.global_batch if self.order.drop_last else 1
        return self.cursor + size > self.order.length

    def _restart(self) -> Iterator[Any]:
        """The batches of this epoch from the cursor on, cut for the present roster."""
        sampler = self._sampler
        sampler.rank, sampler.batches = self._roster.rank, deque()
        sampler.epoch, sampler.begin, sampler.step = self.epoch, self.cursor, self._step.number
        return iter(self._loader)

    def _take(self, data: Any, began_s: float) -> Any:
        """Take a fetched batch in hand; what the script is to see of it."""
        batch = self._sampler.batches.popleft()
        assert batch.step == self._step.number, "batches come in the order in which they were drawn"
        if self._observer is not None:
            data = self._observer.begin_step(data, batch.samples)
        weight = float(batch.samples)
        if self._weight is not None and batch.samples:
            weight = float(self._weight(data))
            if not 0 <= weight < math.inf:
                raise EvenstepError(
                    f"weight=... returned {weight} for the batch of step {batch.step}; it must "
                    "return what the batch's mean loss counts for, such as its number of tokens: a "
                    "finite number that is not negative"
                )
        self._step.fetched(replace(batch, weight=weight), began_s)
        self._batch_end = self.cursor + batch.total
        return data

    @property
    def _next_sample(self) -> int:
        """The sample that comes next, also where a loop was left after its last step."""
        if self._batch_end is not None and self._step.is_left and self._step.is_done:
            return max(self.cursor, self._batch_end)
        return self.cursor

    def leave(self) -> None:
        """End the last step of a loop that was left, if its batch made one."""
        if self._batch_end is None:
            return
        if self._step.is_void or self._step.is_done:
            self._end_step()
        self._batch_end = None
        self._step.drop()

    def leave_epoch(self) -> None:
        """Begin the next epoch, if the last loop was left in the middle of this one."""
        if self._was_left and self.cursor:
            self.epoch, self.cursor = self.epoch + 1, 0
        self._was_left = False

    def _end_step(self) -> None:
        """The loop is done with the batch in hand."""
        assert self._batch_end is not None
        end, self._batch_end = self._batch_end, None
        self._step.end()
        if self._step.number > self._step.batch.step:
            self.cursor = max(self.cursor, end)  # an adopted state may be further

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        return {**self._definition(), "epoch": self.epoch, "cursor": self._next_sample}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position. Refuses one in another order or of another batch size."""
        theirs = {name: value for name, value in state.items() if name not in ("epoch", "cursor")}
        mine = self._definition()
        if theirs != mine:
            raise ConfigError("loader", f"was {theirs} when the run began, and is {mine} now")
        self.epoch, self.cursor = state["epoch"], state["cursor"]

    def _definition(self) -> dict[str, Any]:
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
    if batch > MAX_BATCH:
        raise ConfigError("batch", f"must be at most {MAX_BATCH}, got {batch}")
    if len(dataset) < batch:
        raise ConfigError(
            "batch", f"{batch} is more than the {len(dataset)} samples of the dataset; lower it"
        )
    ours = {"batch_size", "sampler", "batch_sampler"} & options.keys()
    if ours:
        raise ConfigError(
            min(ours), "is evenstep's to choose; give the global batch as batch=..., drop the rest"
        )
