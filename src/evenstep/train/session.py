"""The session: a training process's part in a run, and evenstep's public face."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from evenstep.config import BatchSettings
from evenstep.errors import ConfigError, EvenstepError
from evenstep.strict import whole
from evenstep.train.data.evaluation import PartSampler
from evenstep.train.data.loader import Loader, Weight
from evenstep.train.data.order import rank_ranges
from evenstep.train.data.source import Selection, Transform, check_dataset, check_options
from evenstep.train.data.windows import Window, windows
from evenstep.train.exchange import Exchange
from evenstep.train.job import Job, Model
from evenstep.train.measure.host_load import HostLoad
from evenstep.train.measure.meter import Meter
from evenstep.train.optimizers import OptimizerHooks
from evenstep.train.ports import Observer, Roster
from evenstep.train.reduce.norm_layers import NormLayers
from evenstep.train.reduce.reduce_scatter import weigh_gradients
from evenstep.train.reduce.reducer import Reducer
from evenstep.train.wrong_use import check_model, check_shards, check_unwrapped, refuse_ddp

T = TypeVar("T")


class Finished(SystemExit):
    """An observer has seen enough: the script ends in good order."""


class Session:
    """A worker's part in a run. Use it as a context: `with evenstep.join() as session`."""

    def __init__(self, job: Job, roster: Roster, observer: Observer | None = None) -> None:
        self._job, self._roster, self._observer = job, roster, observer
        self._step, self._plans = job.step, job.plans
        self._host_load = HostLoad()
        self._exchange = Exchange(
            self._step, self._plans, roster, job.loss_scale, job.settings, self._host_load
        )
        self._optimizers = OptimizerHooks(
            job,
            hands_over_state=roster.hands_over_state,
            is_leader=lambda: self.is_leader,
        )
        if observer is not None:
            self._step.on_committed.append(observer.end_step)
        self._releases: list[Callable[[], None]] = []  # give the script's objects back unchanged
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and self._job.has_loader:
                self._job.loader.end_loop()
            self._step.interrupt()
            # Closing a generator that runs the loop is not a failure of the script.
            if error is not None and not isinstance(error, Finished | GeneratorExit):
                self._roster.fail(error)
        finally:
            self.close()

    def close(self) -> None:
        """End this worker's part. The model stays as it is; all objects work as before again."""
        if self._closed:
            return
        self._closed = True
        self._host_load.close()
        if self._job.has_model:
            self._job.model.reducer.close()
        try:
            self._roster.leave()
        finally:
            while self._releases:
                self._releases.pop()()
            self._roster.close()

    @property
    def rank(self) -> int:
        """This worker's rank among those that train now."""
        return self._roster.rank

    @property
    def world(self) -> int:
        """The number of workers that train now."""
        return self._roster.world

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, and its first process: the one to print and save."""
        return self._roster.rank == 0 and self._job.host.is_first

    @property
    def generation(self) -> int:
        """The number of the present roster; 0: none yet."""
        return self._roster.generation

    @property
    def step(self) -> int:
        """Steps taken by the whole cluster; the one at hand counts from its backward pass on."""
        self._optimizers.counts_are_read()
        return self._step.num_taken

    @property
    def void(self) -> bool:
        """Whether the step at hand does not count: a worker was lost, and it will be repeated."""
        return self._step.is_void

    @property
    def batch(self) -> int:
        """The global batch of the coming step."""
        return self._job.loader.global_batch if self._job.has_loader else 0

    @property
    def samples(self) -> int:
        """Samples that the run has used: what a schedule counts in if the batch grows.

        Those that `drop_last` leaves out of an epoch count with it.
        """
        self._optimizers.counts_are_read()
        return self._job.loader.num_used if self._job.has_loader else 0

    @property
    def counted(self) -> int:
        """Samples of the batch at hand that count: 0 where it is only a stand-in."""
        return self._step.batch.own

    @property
    def share(self) -> float:
        """This worker's part of the batch at hand, by samples: what its mean gradient counts."""
        return self._step.batch.samples / self._step.batch.total

    def count(self, items: float, loss: float) -> None:
        """Before `backward`: what this worker's share has of items, such as tokens, and of loss.

        Both are added up over all workers along with the gradients; `counts` has the sums.
        """
        self._step.own_counts = items, loss

    @property
    def counts(self) -> tuple[float, float] | None:
        """Items and loss of the batch at hand over all workers, once its gradients are reduced.

        None on a worker that took over the state of others instead of reducing them.
        """
        reports = self._step.reports
        return (sum(r.items for r in reports), sum(r.loss for r in reports)) if reports else None

    def enter(self) -> None:
        """Join the others now, and take over the run's state, instead of with the first batch."""
        self._check_open("session.enter")
        self._roster.enter()

    def shares_at(self, step: int) -> tuple[int, ...]:
        """The share of each rank at a step, as planned so far."""
        return self._plans.shares_at(step)

    def prepare(self, model: torch.nn.Module, *others: Any, sync_batchnorm: bool = False) -> Any:
        """Prepare the model, and what goes with it, for training on all workers.

        Parameters and buffers become the leader's. Gradients are the share-weighted mean over all
        workers when `backward` returns. Objects come back as they were given. `sync_batchnorm`
        gives batch normalisation the statistics of the whole batch instead of each worker's own.
        """
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                "model",
                f"expected a torch.nn.Module, got {type(model).__name__}; give the model first: "
                "session.prepare(model, optimizer, ...)",
            )
        host = self._job.host
        if host.is_shared:
            check_shards(model, host.size)
        else:
            check_model(model)
        for other in others:
            check_unwrapped(other)
        if self._job.has_model:
            raise ConfigError(
                "prepare", "was called before; put several models into one torch.nn.ModuleList"
            )
        params = [p for p in model.parameters() if p.requires_grad]
        if not params:
            raise ConfigError("model", "has no trainable parameters: there is nothing to train")
        reducer = Reducer(
            params,
            self._step,
            on_ready=self._exchange.fill,
            on_reduced=self._exchange.read,
            on_lost=self._roster.lost,
            host=host,
        )
        norms, device = NormLayers(model, sync=sync_batchnorm), params[0].device
        self._exchange.meter = meter = Meter(device)
        self._job.model = Model(
            module=model, device=device, reducer=reducer, norms=norms, meter=meter
        )
        self._releases += [norms.release, refuse_ddp(model), self._optimizers.watch_others()]
        if host.is_shared:
            self._releases.append(weigh_gradients(model, self._step, host.size))
        for i, other in enumerate(others):
            if isinstance(other, torch.optim.Optimizer):
                self._releases += self._optimizers.attach(other)
            if hasattr(other, "state_dict"):
                self._keep(f"{type(other).__name__}-{i}", other)
        self._roster.prepared()
        if self._observer is not None:
            self._observer.watch_model(model, reducer)
        return (model, *others) if others else model

    def register(self, name: str, thing: Any) -> None:
        """Keep an object with `state_dict` along with the run."""
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise ConfigError(name, "has no state_dict and load_state_dict")
        check_unwrapped(thing)
        if isinstance(thing, torch.optim.Optimizer):
            raise ConfigError(name, "is an optimizer: give it to session.prepare(model, ...)")
        if name in self._job.stateful:
            raise ConfigError(name, "is registered already; choose another name")
        entered = self._roster.hands_over_state and self._roster.generation
        if entered and isinstance(thing, LRScheduler | GradScaler):
            raise ConfigError(
                name,
                "register schedulers and GradScalers before the first batch: a step that is "
                "repeated after the loss of a worker would otherwise update this one twice",
            )
        self._keep(name, thing)

    def _keep(self, name: str, thing: Any) -> None:
        if isinstance(thing, GradScaler) and thing.is_enabled():
            self._refuse_sharded("an enabled GradScaler")
        self._job.stateful[name] = thing
        self._job.loss_scale.add(thing)

    def loader(
        self,
        dataset: Any,
        *,
        batch: int = 0,
        per_worker: int = 0,
        limit: int = 0,
        weight: Weight | None = None,
        shuffle: bool | None = None,
        drop_last: bool = False,
        steps: int = 0,
        replacement: bool = False,
        sampler: Any = None,
        transform: Transform | None = None,
        **options: Any,
    ) -> Loader:
        """Batches of this worker's share of the global batch; each sample once an epoch.

        The dataset is shuffled unless `shuffle=False`; `replacement` draws samples independently;
        `sampler` is a sampler of the whole dataset, or a function of the epoch that returns
        indices. With `steps`, a loop has so many steps, through as many epochs as it takes. An
        iterable without a length is a stream, used in its own order; `transform` is applied to
        those of its samples that this worker trains on.

        The global batch is `batch` for any number of workers; or it grows with them, `per_worker`
        for each up to `limit`, and the learning rate with it, by the setting `batch.lr_rule`.
        `weight` returns what a batch's mean loss counts for, where that is not its samples: the
        number of tokens or pixels, say. Further options are those of `DataLoader`.
        """
        if self._job.has_loader:
            raise ConfigError("loader", "a session has one; use session.evaluation for others")
        size = BatchSettings(
            size=whole("batch", batch, 0 if per_worker else 1),
            per_worker=whole("per_worker", per_worker, 0),
            limit=whole("limit", limit, 0),
        )
        selection = Selection(
            batch=size,
            seed=self._job.options.seed,
            shuffle=shuffle,
            drop_last=drop_last,
            steps=steps,
            replacement=replacement,
            sampler=sampler,
            transform=transform,
        )
        loader = Loader(
            dataset,
            selection,
            step=self._step,
            plans=self._plans,
            roster=self._roster,
            host=self._job.host,
            check_open=self._check_open,
            end_epoch=self._end_epoch,
            weight=weight,
            observer=self._observer,
            **options,
        )
        self._job.loader = loader
        try:
            self._exchange.planner = planner = self._roster.start()
        except BaseException:
            self._job.forget_loader()  # the script may try again with other arguments
            raise
        self._exchange.prefetched = loader.prefetched
        self._step.on_committed.append(partial(planner.report, self._step))
        return loader

    def epochs(self, num: int) -> Iterator[int]:
        """Epoch numbers from where the run stands.

        With each of them an epoch begins: what a loop that was left has not used of the one before
        stays unused.
        """
        if not self._job.has_loader:
            raise ConfigError("epochs", "call session.loader(...) first")
        self._job.num_epochs = num = whole("epochs", num, 0)
        self._roster.enter()
        loader = self._job.loader
        epoch = loader.epoch
        while epoch < num:
            loader.next_epoch = epoch
            yield epoch
            self._leave_loop()
            loader.end_loop()
            # A spare comes back in a later one, and a body may have several loops.
            epoch = max(epoch + 1, loader.epoch, loader.next_epoch)
        self._roster.trained()

    def finish(self) -> None:
        """Training is over, on all workers: write the last checkpoint.

        `epochs` does so at its end. To be called by loops without it before they change the model,
        to that of their best epoch say.
        """
        self.sum(0.0)  # nobody goes on before all have the last step
        self._job.loader.end_loop()
        self._roster.trained()

    def enumerate(self, loader: Loader, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Batches with their number within the epoch, which a batch keeps when it is repeated.

        Count with these where the number matters, as in `if (i + 1) % 4 == 0: optimizer.step()`:
        the built-in `enumerate` counts a batch again that is repeated after the loss of a worker,
        and begins with 0 in a worker that joins in the middle of an epoch.
        """
        self._optimizers.trust_counts()
        for batch in loader:
            yield start + loader.index, batch

    def accumulate(self, loader: Loader, num_batches: int) -> Iterator[Window]:
        """Windows of so many batches, for one optimizer step each; the last may be shorter.

            for window in session.accumulate(loader, 4):
                for x, y in window:
                    (criterion(model(x), y) / len(window)).backward()
                optimizer.step()
                optimizer.zero_grad()

        A batch that must be repeated is repeated inside of its window, so windows may be counted
        in any way.
        """
        self._optimizers.trust_counts()
        return windows(loader, whole("num_batches", num_batches, 1))

    def attempt(self, compute: Callable[[Any], T], batch: Any) -> T:
        """Call `compute(batch)`, its forward and backward pass, until the step stands.

        If a worker is lost, `compute` is called again at once with the samples as cut for the
        survivors, and the loop never notices.
        """
        self._optimizers.trust_counts()
        result = compute(batch)
        loader = self._job.loader
        while loader.repeat():
            result = compute(loader.data)
        return result

    def sum(self, value: torch.Tensor | float) -> torch.Tensor:
        """The sum of a value over all workers. All must ask at the same point."""
        self._check_open("session.sum")
        self._roster.enter()
        self._leave_loop()
        tensor = torch.as_tensor(value).detach()
        mine = tensor.to("cpu", copy=True)  # from a GPU, this waits for its work
        began_s = time.perf_counter()
        summed = self._roster.sum(mine)
        if self._job.has_model:
            self._job.model.meter.waited(time.perf_counter() - began_s)
        return summed.to(tensor.device)

    def gather(self, features: torch.Tensor) -> torch.Tensor:
        """The features of the whole batch, a row for each sample, on every worker.

        For losses over pairs of samples (SimCLR, CLIP): gradients flow back to the workers that the
        rows come from, so the step is that of one process, whether each worker computes the loss of
        the whole batch or the mean loss of its own rows against all. All workers must call it at
        the same points of a step. The rows of this worker begin at `session.first_row`.
        """
        self._check_open("session.gather")
        self._refuse_sharded("session.gather")
        step = self._step
        if not step.has_batch:
            raise EvenstepError("session.gather needs a batch: call it in a loop over the loader")
        if step.num_passes and not features.requires_grad:
            raise EvenstepError(
                "session.gather was called after the batch's backward pass. Call it before: if a "
                "worker is lost afterwards the step stands, and its rows would be missing."
            )
        return self._job.features.gather(features, is_weighted=self._job.loader.is_weighted)

    @property
    def first_row(self) -> int:
        """Where this worker's samples begin among those of the whole batch."""
        return self._step.batch.begin

    def evaluation(
        self, dataset: Any, *, batch_size: int, shuffle: bool = False, **options: Any
    ) -> DataLoader[Any]:
        """A loader over this worker's part of a dataset: over all workers each sample once.

        Parts follow the roster and its shares as they are when a loop over it begins, so that all
        finish together. Add up counts with `session.sum`.
        """
        self._refuse_sharded("session.evaluation")
        check_dataset(dataset)
        check_options(options)
        sampler = PartSampler(len(dataset), self._enter_evaluation, self._part_of, shuffle=shuffle)
        return DataLoader(dataset, batch_size=batch_size, sampler=sampler, **options)

    def _enter_evaluation(self) -> None:
        """Be in a generation, with running statistics averaged even if a loop was left."""
        self._roster.enter()
        is_done = self._step.has_batch and self._step.is_done
        if self._leave_loop() or (is_done and self._job.loader.is_last):
            self._average_norms()

    def _part_of(self, length: int) -> tuple[int, int]:
        """The begin and end of this worker's part of a dataset."""
        if self._roster.is_late:
            return 0, length
        shares = self._plans.newest.shares if self._plans else (1,) * self.world
        return rank_ranges(length, shares)[self.rank]

    def _leave_loop(self) -> bool:
        """If the loop over the loader was left, end its last step, and settle as after any step."""
        if not self._step.is_left or not self._job.has_loader:
            return False
        was_step = self._step.is_void or self._step.is_done
        self._job.loader.leave()
        if was_step:
            self._roster.settle(in_loop=False)
        return True

    def _end_epoch(self) -> None:
        self._roster.finish_epoch()
        self._average_norms()

    def _average_norms(self) -> None:
        share = float(self._plans.shares_at(self._step.number - 1)[self.rank])
        self._job.model.norms.average(self._roster.sum, self.world, share)

    def _refuse_sharded(self, what: str) -> None:
        """Raise if the processes of a host shard the model."""
        if self._job.host.is_shared:
            raise ConfigError(
                "fsdp.join", f"{what} is not there for hosts that shard their model: leave it out"
            )

    def _check_open(self, what: str) -> None:
        """Raise if the session is closed: this call needs all workers."""
        if self._closed:
            raise EvenstepError(
                f"{what} was used after the session was closed: the other workers do not take part "
                "any more. Use it inside of `with evenstep.join() as session`."
            )
