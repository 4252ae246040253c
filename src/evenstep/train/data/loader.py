"""Loops over the data: this worker's batches by step number, and the position they have reached."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Self

from torch.utils.data import DataLoader

from evenstep.decide.learning_rate import global_batch
from evenstep.errors import ConfigError, EvenstepError
from evenstep.strict import whole
from evenstep.train.comm.host import Host
from evenstep.train.data.share_sampler import ShareSampler
from evenstep.train.data.source import Kept, Selection, check_options, is_stream
from evenstep.train.data.weighting import weighted
from evenstep.train.plan.plans import Plans
from evenstep.train.ports import Observer, Roster
from evenstep.train.step import Step

log = logging.getLogger("evenstep")

Weight = Callable[[Any], float]

# In the state; the rest of it must never change.
POSITION = ("epoch", "cursor", "index", "before", "digest", "in_loop")


class Loop:
    """One loop of the script over the loader."""

    def __init__(self, epoch: int = 0, num_void: int = 0) -> None:
        self.epoch, self.num_void_before = epoch, num_void
        self.data: Any = None  # the batch in hand
        self.index = 0  # its number within the epoch
        self.num_ended = 0  # batches that had a backward pass, repeated ones included
        self.cut_for = 0  # the generation for which batches are cut
        self.is_left = self.is_over = False


class Loader:
    """What `session.loader` returns: each loop over it is one epoch, as with a `DataLoader`.

    The first loop of a worker that joins, or of a run that is resumed, continues the epoch that the
    run is in. Samples of a loop that was left, by `break` say, count as used if they were trained
    on; the next loop begins a new epoch.
    """

    def __init__(
        self,
        dataset: Any,
        selection: Selection,
        *,
        step: Step,
        plans: Plans,
        roster: Roster,
        host: Host,
        begin_loop: Callable[[], None],
        end_epoch: Callable[[], None],
        weight: Weight | None,
        observer: Observer | None = None,
        **options: Any,
    ) -> None:
        check_options(options)
        if not options.get("in_order", True):
            raise ConfigError(
                "in_order", "must be True: all workers train on the samples of the same step"
            )
        self.order = selection.order_of(dataset)
        self.dataset = dataset
        self.batch = selection.batch
        self._step, self._plans, self._roster, self._host = step, plans, roster, host
        self._begin_loop, self._end_epoch = begin_loop, end_epoch
        self._weight, self._observer = weight, observer
        self.epoch = self.cursor = 0  # the epoch, and the sample of it, that comes next
        self.next_epoch = 0  # that the script's next loop is for
        self._index = 0  # steps of the epoch before the one at hand
        self._num_before = 0  # samples of earlier epochs
        self._batch_end: int | None = None  # the sample at which the batch in hand ends
        self._loop = Loop()
        self._loop.is_over = True  # before the first one
        self._others_in_loop = True  # as of when this worker took over their state
        self._has_logged_order = False
        if is_stream(dataset):
            if observer is not None:
                raise ConfigError("dataset", "is a stream, which evenstep verify cannot compare")
            dataset = Kept(selection.transform)
        if observer is not None:
            dataset, options = observer.watch_data(dataset, options)
        self._sampler = ShareSampler(self.order, plans.shares_at, roster.rank, host)
        self._loader = DataLoader(dataset, batch_sampler=self._sampler, **options)
        self._batches: Iterator[Any] = iter(())
        self.prefetched = self._loader.num_workers * (self._loader.prefetch_factor or 0)

    # What a DataLoader has.

    def __len__(self) -> int:
        """Steps in an epoch of the present global batch."""
        return self.order.num_steps(self.global_batch)

    @property
    def batch_size(self) -> int:
        """The global batch of the coming step."""
        return self.global_batch

    @property
    def drop_last(self) -> bool:
        """Whether samples that do not fill the last batch of an epoch are left out."""
        return self.order.drop_last

    @property
    def num_workers(self) -> int:
        """Processes that load data."""
        return self._loader.num_workers

    @property
    def sampler(self) -> Self:
        """For scripts that call `loader.sampler.set_epoch(epoch)`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The next loop is for this epoch. If the run is past it already, that loop is empty."""
        if whole("epoch", epoch, 0) < self.next_epoch:
            raise ConfigError(
                "set_epoch",
                f"{epoch} was trained on already: every loop over the loader is the next epoch, in "
                "another order. Give it growing numbers, or do not call it",
            )
        self.next_epoch = epoch

    # Where the run is.

    @property
    def global_batch(self) -> int:
        """Samples of the coming step, over all workers."""
        if self._plans:
            return sum(self._plans.shares_at(self._step.num_taken))
        if self.batch.per_worker and not self._roster.generation:
            raise ConfigError(
                "loader",
                "how many batches an epoch has is not known before the first one, because the "
                "batch grows with the number of workers. Give batch=..., or let the schedule count "
                "in session.samples",
            )
        return global_batch(self.batch, self._roster.world)

    @property
    def num_used(self) -> int:
        """Samples of the whole job that are used, including those of the step at hand."""
        return self._num_before + self._next_sample

    @property
    def is_weighted(self) -> bool:
        """Whether workers' mean losses are weighted by something other than samples."""
        return self._weight is not None

    @property
    def index(self) -> int:
        """The number of the batch in hand within its epoch, the same each time it is repeated."""
        return self._loop.index

    @property
    def next_index(self) -> int:
        """The number within its epoch of the batch that comes next, or is in hand and not done."""
        return self._index

    @property
    def data(self) -> Any:
        """The batch in hand."""
        return self._loop.data

    @property
    def is_last(self) -> bool:
        """Whether no further step fits into the epoch after the one at hand."""
        return self._is_over_at(self._next_sample)

    def num_left(self, most: int) -> int:
        """Steps of the epoch from the batch in hand on, up to `most`. Reads a stream ahead."""
        num, begin = 0, self.cursor
        while num < most:
            end = self.order.end(self.epoch, begin, self.global_batch)
            if end == begin:
                break
            num, begin = num + 1, end
        return num

    # Loops.

    def __iter__(self) -> Iterator[Any]:
        step = self._step
        self._begin_loop()
        self._roster.enter()
        self._log_order()
        self.end_loop()
        loop = self._loop = Loop(self.next_epoch, step.num_void)
        self.next_epoch += 1
        if loop.epoch < self.epoch:
            log.warning(
                "the loop over epoch %d has no batches: the run is in epoch %d. To begin there, "
                "write `for epoch in session.epochs(...)`",
                *(loop.epoch, self.epoch),
            )
            self._roster.fall_behind()
            loop.is_over = True
            return
        if loop.epoch > self.epoch:
            self._begin(loop.epoch)
        while self._advance(loop):
            try:
                yield loop.data
            except GeneratorExit:  # by `break`, an error, or the garbage collector
                if loop is self._loop and not self._roster.is_ending:
                    loop.is_left = True
                    if self._batch_end is not None:
                        step.leave()
                raise
            if loop is not self._loop:
                raise EvenstepError(
                    "this loop over session.loader(...) was left for another one, which has begun "
                    "another epoch. Continue with the newest iterator only."
                )
            self._end_step()

    def _advance(self, loop: Loop) -> bool:
        """Take the next batch in hand, or end the epoch."""
        generation = self._roster.settle(in_loop=True)
        if self.epoch != loop.epoch:
            loop.is_over = True
            if self._others_in_loop or self.epoch > loop.epoch + 1:
                self._roster.fall_behind()  # this worker was a spare for a while
        elif self._is_over:
            next(self._batches, None)  # lets loader processes shut down cleanly
            self._finish(loop)
        else:
            self._fetch(loop, generation)
        return not loop.is_over

    def _fetch(self, loop: Loop, generation: int) -> None:
        """Take the next batch in hand."""
        began_s = time.monotonic()
        self._step.is_between = False
        if generation != loop.cut_for:  # prefetched batches were cut for another roster
            loop.cut_for, self._batches = generation, self._restart()
        loop.data = self._take(next(self._batches), began_s)

    def repeat(self) -> bool:
        """If the step at hand is void, take its samples in hand again, cut for the survivors.

        Returns False if there is nothing to compute again: the step stands, or others have
        completed it, and this worker has their state. From then on it must not become void.
        """
        loop, step = self._loop, self._step
        step.stands = not step.is_void
        if not step.stands:
            # A spare leaves instead of resting: by its return, this loop would be out of date.
            generation = self._roster.settle(in_loop=False)
            step.stands = step.is_discarded or self.epoch != loop.epoch
        if not step.stands:
            self._fetch(loop, generation)
        return not step.stands

    def _log_order(self) -> None:
        """Log once in which order the data is used."""
        if not self._has_logged_order and self._roster.rank == 0:
            log.info("data: %s; %d samples a step", self.order, self.global_batch)
        self._has_logged_order = True

    def _begin(self, epoch: int) -> None:
        self._num_before = self._num_before_epoch(epoch)
        self.epoch, self.cursor, self._index = epoch, 0, 0

    def _num_before_epoch(self, epoch: int) -> int:
        """Samples of all epochs before a later one; of a stream, those that were used."""
        if self.order.length is None:
            return self._num_before + self._next_sample
        return epoch * self.order.length

    def _finish(self, loop: Loop) -> None:
        """All steps of the epoch are taken."""
        loop.is_over = True
        # For workers that adopt this state now: if the batch has shrunk, what `drop_last` leaves
        # out might make up a step again.
        end = self.cursor + self.global_batch
        self.cursor = self.order.samples.end(self.epoch, self.cursor, end)
        self._end_epoch()  # may load the state of workers that are in the next epoch already
        self._begin(loop.epoch + 1)

    @property
    def _is_over(self) -> bool:
        """Whether no further step fits into the epoch."""
        return self._is_over_at(self.cursor)

    def _is_over_at(self, sample: int) -> bool:
        return self.order.end(self.epoch, sample, self.global_batch) == sample

    def _restart(self) -> Iterator[Any]:
        """The batches of this epoch from the cursor on, cut for the present roster."""
        sampler = self._sampler
        sampler.rank, sampler.batches = self._roster.rank, deque()
        sampler.epoch, sampler.begin, sampler.step = self.epoch, self.cursor, self._step.number
        sampler.num_before = self._num_before
        return iter(self._loader)

    def _take(self, data: Any, began_s: float) -> Any:
        """Take a fetched batch in hand. Returns what the script gets to see."""
        batch = self._sampler.batches.popleft()
        assert batch.step == self._step.number, "batches come in the order in which they were drawn"
        if self._observer is not None:
            data = self._observer.begin_step(data, batch.own)
        if self._weight is not None:
            batch = weighted(batch, data, self._weight, self._host)
        self._step.fetched(batch, began_s)
        self._batch_end, self._loop.index = self.cursor + batch.total, self._index
        return data

    @property
    def _next_sample(self) -> int:
        """The sample that comes next, after the step at hand if it counts."""
        return self.cursor if self._end_of_done is None else max(self.cursor, self._end_of_done)

    @property
    def _end_of_done(self) -> int | None:
        """Where the batch in hand ends, if its step counts."""
        return self._batch_end if self._step.is_done else None

    def leave(self) -> None:
        """End the last step of a loop that was left, if its batch made one."""
        if self._batch_end is None:
            return
        if self._step.is_void or self._step.is_done:
            self._end_step()
        self._batch_end = None
        self._step.drop()

    def end_loop(self) -> None:
        """The script has left its loop for good, maybe before it exhausted the data."""
        self.leave()
        loop = self._loop
        if loop.is_over:
            return
        num_void = self._step.num_void - loop.num_void_before
        if loop.epoch == self.epoch and self._is_over:
            self._finish(loop)
        elif num_void and self.order.length is not None and loop.num_ended >= len(self):
            raise EvenstepError(
                f"this loop took {loop.num_ended} batches of epoch {loop.epoch}, but "
                f"{num_void} of them had to be repeated because a worker was lost, so the "
                "epoch is not complete. Let the loader say when it is: `for batch in loader`, or "
                "`for i, batch in session.enumerate(loader)`."
            )
        loop.is_over = True

    def _end_step(self) -> None:
        """The loop is done with the batch in hand."""
        assert self._batch_end is not None
        end, self._batch_end = self._batch_end, None
        self._loop.num_ended += 1
        self._step.end()
        if self._step.number > self._step.batch.step:
            # An adopted state may be further.
            self.cursor, self._index = max(self.cursor, end), max(self._index, self._loop.index + 1)
            self.order.samples.forget(self.epoch, self.cursor)

    # The position in the data, handed over to joiners and kept in checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, after the step at hand if it counts."""
        loop = self._loop
        if loop.is_left:  # the next loop begins an epoch
            before = self._num_before_epoch(self.next_epoch)
            position = {"epoch": self.next_epoch, "cursor": 0, "index": 0, "before": before}
        else:
            index = self._index + (self._end_of_done is not None)
            position = {"epoch": self.epoch, "cursor": self._next_sample, "index": index}
            position["before"] = self._num_before
        digest = self._digest_at(position["epoch"], position["cursor"])
        is_in_loop = not (loop.is_over or loop.is_left)
        return {**self._definition(), **position, "digest": digest, "in_loop": is_in_loop}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position. Refuses one in another order or of another batch size."""
        # Older checkpoints have no "order".
        theirs = {"order": ""} | {k: value for k, value in state.items() if k not in POSITION}
        mine = self._definition()
        if theirs != mine:
            raise ConfigError("loader", f"was {theirs} when the run began, and is {mine} now")
        loop = self._loop
        if self._batch_end is not None and state["epoch"] > loop.epoch:
            # They left their loop after this batch, and so will this worker.
            end, index = self._batch_end, loop.index + 1
            here = {"epoch": loop.epoch, "cursor": end, "index": index, "before": self._num_before}
            state = {**state, **here, "digest": 0}
        self.epoch, self.cursor = state["epoch"], state["cursor"]
        if (digest := state.get("digest")) and digest != self._digest_at(self.epoch, self.cursor):
            raise ConfigError(
                "loader",
                f"its sampler or stream gives the samples of epoch {self.epoch} in another order "
                "than the run has them. It must depend on the epoch only; random numbers are "
                "seeded for it",
            )
        size = self.batch.size or self.cursor or 1
        self._index = state.get("index", self.cursor // size)  # older checkpoints have none
        self._num_before = state.get("before", self.epoch * (self.order.length or 0))
        self._others_in_loop = state.get("in_loop", True)

    def _digest_at(self, epoch: int, cursor: int) -> int:
        return self.order.samples.digest(epoch, cursor, cursor)

    def _definition(self) -> dict[str, Any]:
        batch = self.batch
        sizes = {"batch": batch.size, "per_worker": batch.per_worker, "limit": batch.limit}
        return {**self.order.facts, **sizes}
