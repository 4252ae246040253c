"""Loops over the data: this worker's batches by step number."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Self

from torch.utils.data import DataLoader

from evenstep.decide.learning_rate import global_batch
from evenstep.errors import ConfigError, EvenstepError
from evenstep.train.comm.host import Host
from evenstep.train.data.loops import Loop, ScriptLoops
from evenstep.train.data.position import DataPosition, check_digest, pack, unpack
from evenstep.train.data.share_sampler import ShareSampler
from evenstep.train.data.source import Kept, Selection, check_options, is_stream
from evenstep.train.data.weighting import weighted
from evenstep.train.plan.plans import Plans
from evenstep.train.ports import Observer, Roster
from evenstep.train.step import Step

log = logging.getLogger("evenstep")

Weight = Callable[[Any], float]


class Loader:
    """What `session.loader` returns: each loop over it is one epoch, as with a `DataLoader`.

    The first loop of a worker that joins, or of a run that is resumed, continues the epoch that the
    run is in. Samples of a loop that was left, by `break` say, count as used if they were trained
    on; the next loop begins a new epoch. A loop that was left before its first backward pass, such
    as `next(iter(loader))` to look at a batch, has used nothing, and the next one is for the same
    epoch.
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
        self.position = DataPosition()  # that of the step at hand, or the next one
        self.loops = ScriptLoops()
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
        self._offer(self._loader)
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

    def _offer(self, plain: DataLoader[Any]) -> None:
        """Have what else scripts ask of a `DataLoader`: that of the one which loads the shares."""
        self.num_workers, self.prefetch_factor = plain.num_workers, plain.prefetch_factor
        self.batch_sampler, self.collate_fn = plain.batch_sampler, plain.collate_fn
        self.generator, self.worker_init_fn = plain.generator, plain.worker_init_fn
        self.pin_memory, self.timeout = plain.pin_memory, plain.timeout
        self.persistent_workers = plain.persistent_workers
        self.multiprocessing_context = plain.multiprocessing_context

    @property
    def sampler(self) -> Self:
        """For scripts that call `loader.sampler.set_epoch(epoch)`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The next loop is for this epoch. If the run is past it already, that loop is empty."""
        self.loops.set_epoch(epoch)

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
    def epoch(self) -> int:
        """The epoch that the run is in."""
        return self.position.epoch

    @property
    def num_used(self) -> int:
        """Samples that the whole job has trained on, including those of the step at hand."""
        return self._reached.used

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
        return self.position.index

    @property
    def data(self) -> Any:
        """The batch in hand."""
        return self._loop.data

    @property
    def is_last(self) -> bool:
        """Whether no further step fits into the epoch after the one at hand."""
        return self._is_over_at(self._reached)

    def num_left(self, most: int) -> int:
        """Steps of the epoch from the batch in hand on, up to `most`. Reads a stream ahead."""
        num, begin = 0, self.position.cursor
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
        if self.loops.repeats_look():
            yield from islice(self._restart(), 1)
            return
        loop = self._loop = Loop(self.loops.next_epoch, step.num_void)
        if loop.epoch < self.epoch:
            log.warning(
                "the loop over epoch %d has no batches: the run is in epoch %d. To begin there, "
                "write `for epoch in session.epochs(...)`; to look at a sample, take dataset[0]",
                *(loop.epoch, self.epoch),
            )
            self._roster.fall_behind()
            self._end(loop)
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
            self._end(loop)
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
        self.position = self.position.at_epoch(epoch, self.order.length)

    def _finish(self, loop: Loop) -> None:
        """All steps of the epoch are taken."""
        self._end(loop)
        # For workers that adopt this state now: if the batch has shrunk, what `drop_last` leaves
        # out might make up a step again.
        end = self.position.cursor + self.global_batch
        self.position = self.position.at_end(
            self.order.samples.end(self.epoch, self.position.cursor, end)
        )
        self._end_epoch()  # may load the state of workers that are in the next epoch already
        self._begin(loop.epoch + 1)

    def _end(self, loop: Loop) -> None:
        """A loop is over, and counts."""
        loop.is_over = True
        self.loops.count(loop)

    @property
    def _is_over(self) -> bool:
        """Whether no further step fits into the epoch."""
        return self._is_over_at(self.position)

    def _is_over_at(self, position: DataPosition) -> bool:
        begin = position.cursor
        return self.order.end(position.epoch, begin, self.global_batch) == begin

    def _restart(self) -> Iterator[Any]:
        """The batches of this epoch from the cursor on, cut for the present roster."""
        sampler = self._sampler
        sampler.rank, sampler.batches = self._roster.rank, deque()
        sampler.position, sampler.step = self.position, self._step.number
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
        self._batch_end = self.position.cursor + batch.total
        self._loop.index = self.position.index
        return data

    @property
    def _reached(self) -> DataPosition:
        """The position after the step at hand, if it counts."""
        if self._batch_end is None or not self._step.is_done:
            return self.position
        return self.position.after(self._batch_end)

    def leave(self) -> None:
        """End the last step of a loop that was left, if its batch made one."""
        if self._batch_end is None:
            return
        if self._had_backward:
            self._end_step()
        self._batch_end = None
        self._step.drop()

    @property
    def _had_backward(self) -> bool:
        """Whether the batch in hand had a backward pass, void or not."""
        return self._batch_end is not None and (self._step.is_void or self._step.is_done)

    def end_loop(self) -> None:
        """The script has left its loop for good, maybe before it exhausted the data."""
        self.leave()
        loop = self._loop
        if loop.is_over:
            return
        num_void = self._step.num_void - loop.num_void_before
        if loop.epoch == self.epoch and self._is_over:
            self._finish(loop)
        elif not self._is_used(loop):
            self.loops.looked()
        elif num_void and self.order.length is not None and loop.num_ended >= len(self):
            raise EvenstepError(
                f"this loop took {loop.num_ended} batches of epoch {loop.epoch}, but "
                f"{num_void} of them had to be repeated because a worker was lost, so the "
                "epoch is not complete. Let the loader say when it is: `for batch in loader`, or "
                "`for i, batch in session.enumerate(loader)`."
            )
        else:
            self._end(loop)
        loop.is_over = True

    def _is_used(self, loop: Loop) -> bool:
        """Whether a loop had a backward pass, or is over an epoch that others have begun."""
        has_begun = (self.epoch, self.position.cursor) > (loop.epoch, 0)
        return loop.num_ended > 0 or self._had_backward or has_begun

    def _end_step(self) -> None:
        """The loop is done with the batch in hand."""
        assert self._batch_end is not None
        end, self._batch_end = self._batch_end, None
        loop = self._loop
        loop.num_ended += 1
        if loop.num_ended == 1:
            self.loops.count(loop)
            if self._roster.hands_over_state and self._roster.rank == 0:
                self.loops.warn_of_looks()
        self._step.end()
        if self._step.number > self._step.batch.step:
            self.position = self.position.after(end)
            self.order.samples.forget(self.epoch, self.position.cursor)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, after the step at hand if it counts."""
        loop, position = self._loop, self._reached
        if loop.is_left:
            coming = max(self.loops.next_epoch, loop.epoch + 1 if self._is_used(loop) else 0)
            if coming > position.epoch:  # the next loop begins an epoch
                position = position.at_epoch(coming, self.order.length)
        in_loop = not (loop.is_over or loop.is_left)
        state = pack(position, self.order, self.batch)
        return {**state, **self.loops.state_dict(), "in_loop": in_loop}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position. Refuses one in another order or of another batch size."""
        theirs, loop = unpack(state, self.order, self.batch), self._loop
        if self._batch_end is not None and theirs.epoch > loop.epoch:
            # They left their loop after this batch, and so will this worker.
            here = self.position.after(self._batch_end)
            self.position = replace(here, used=theirs.used)
        else:
            check_digest(state, theirs, self.order)
            self.position = theirs
        self._others_in_loop = state.get("in_loop", True)
        self.loops.load_state_dict(state)

    def continue_at(self, epoch: int, num_batches: int) -> None:
        """Continue after so many batches of an epoch, as a framework's own checkpoint says."""
        length, size = self.order.length, self.batch.size
        assert length is not None, "a framework that counts batches has a dataset with a length"
        in_epoch = length - length % size if self.drop_last else length
        cursor = min(num_batches * size, length)
        begin = DataPosition(used=epoch * in_epoch).at_epoch(epoch, length)
        self.position = replace(begin.after(cursor), index=num_batches)
