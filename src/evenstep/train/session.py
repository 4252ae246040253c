"""The session: a training process's part in a run, and evenstep's public face."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch.amp import GradScaler
from torch.utils.data import DataLoader

from evenstep.config import BatchSettings
from evenstep.errors import ConfigError, EvenstepError
from evenstep.strict import whole
from evenstep.train.between_steps import BetweenSteps
from evenstep.train.data.loader import Loader, Weight
from evenstep.train.data.source import Selection, Transform, check_dataset, check_options
from evenstep.train.data.windows import Window, windows
from evenstep.train.exchange import Exchange
from evenstep.train.framework_loop import FrameworkLoop
from evenstep.train.job import Job, Model
from evenstep.train.measure.host_load import HostLoad
from evenstep.train.measure.meter import Meter
from evenstep.train.measure.throughput import RecentSteps
from evenstep.train.optimizers import OptimizerHooks
from evenstep.train.ports import Observer, Roster
from evenstep.train.reduce.norm_layers import NormLayers
from evenstep.train.reduce.reduce_scatter import weigh_gradients
from evenstep.train.reduce.reducer import Reducer
from evenstep.train.wrong_use import check_given, check_registered, refuse_ddp, refuse_sharded

T = TypeVar("T")


class Finished(SystemExit):
    """An observer has seen enough: the script ends in good order."""


class Session:
    """A worker's part in a run. Use it as a context: `with evenstep.join() as session`."""

    def __init__(self, job: Job, roster: Roster, observer: Observer | None = None) -> None:
        self._job, self._roster, self._observer = job, roster, observer
        self._step, self._plans, self._counts = job.step, job.plans, job.updates.windows
        self._host_load = HostLoad()
        self._recent = RecentSteps(self._step)
        self._exchange = Exchange(
            self._step,
            self._plans,
            roster,
            job.loss_scale,
            job.settings,
            job.updates,
            self._host_load,
        )
        self._optimizers = OptimizerHooks(
            job,
            hands_over_state=roster.hands_over_state,
            is_leader=lambda: self.is_leader,
            world=lambda: self.world,
        )
        if observer is not None:
            self._step.on_committed.append(observer.end_step)
        self._releases: list[Callable[[], None]] = []  # give the script's objects back unchanged
        self._between = BetweenSteps(job, roster)
        self.framework = FrameworkLoop(job, roster, self._between)  # for adapters

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
        if self._job.is_over:
            return
        self._job.is_over = True
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
        self._counts.is_counted = True
        return self._step.num_taken

    @property
    def throughput(self) -> float:
        """Samples per second of all workers, over the last steps; 0 before the first."""
        return self._recent.samples_per_s

    @property
    def limit(self) -> float:
        """Samples per second that the best shares would give, by the workers' measured curves.

        Fitted when asked for, which takes milliseconds: ask now and then, not at every step.
        """
        estimate = self._recent.estimate()
        return estimate.limit if estimate else 0.0

    @property
    def speedup(self) -> float:
        """The last steps' throughput over that of equal shares, by the same curves; 0: unknown."""
        estimate = self._recent.estimate()
        return estimate.speedup if estimate else 0.0

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
        """Samples that the run has trained on: what a schedule counts in if the batch grows.

        Not those that a loop which was left early, or `drop_last`, leaves out.
        """
        self._counts.is_counted = True
        return self._job.loader.num_used if self._job.has_loader else 0

    @property
    def counted(self) -> int:
        """Samples of the batch at hand that count: 0 where it is only a stand-in."""
        return self._step.batch.own

    def shares_at(self, step: int) -> tuple[int, ...]:
        """The share of each rank at a step, as planned so far."""
        return self._plans.shares_at(step)

    def prepare(self, model: torch.nn.Module, *others: Any, sync_batchnorm: bool = False) -> Any:
        """Prepare the model, and what goes with it, for training on all workers.

        Parameters and buffers become the leader's. Gradients are the share-weighted mean over all
        workers when `backward` returns. Objects come back as they were given. `sync_batchnorm`
        gives batch normalisation the statistics of the whole batch instead of each worker's own.
        """
        host = self._job.host
        check_given(model, others, host)
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
        entered = self._roster.hands_over_state and self._roster.generation
        check_registered(name, thing, self._job.stateful, may_be_repeated=bool(entered))
        self._keep(name, thing)

    def _keep(self, name: str, thing: Any) -> None:
        if isinstance(thing, GradScaler) and thing.is_enabled():
            refuse_sharded(self._job.host, "an enabled GradScaler")
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
            begin_loop=self._between.begin_loop,
            end_epoch=self._between.end_epoch,
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
            loader.loops.number(epoch)
            yield epoch
            self._between.leave_loop()
            loader.end_loop()
            # A spare comes back in a later one, and a body may have several loops.
            epoch = max(epoch + 1, loader.epoch, loader.loops.next_epoch)
        self._roster.trained()

    def enumerate(self, loader: Loader, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Batches with their number within the epoch, which a batch keeps when it is repeated.

        Count with these where the number matters, as in `if (i + 1) % 4 == 0: optimizer.step()`:
        the built-in `enumerate` counts a batch again that is repeated after the loss of a worker,
        and begins with 0 in a worker that joins in the middle of an epoch.
        """
        self._counts.is_trusted = True
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
        self._counts.is_trusted = True
        return windows(loader, whole("num_batches", num_batches, 1))

    def attempt(self, compute: Callable[[Any], T], batch: Any) -> T:
        """Call `compute(batch)`, its forward and backward pass, until the step stands.

        If a worker is lost, `compute` is called again at once with the samples as cut for the
        survivors, and the loop never notices.
        """
        self._counts.is_trusted = True
        result = compute(batch)
        loader = self._job.loader
        while loader.repeat():
            result = compute(loader.data)
        return result

    def sum(self, value: torch.Tensor | float) -> torch.Tensor:
        """The sum of a value over all workers. All must ask at the same point.

        It has the value's dtype: of truth values, it is whether any is true.
        """
        return self._between.sum(value)

    def gather(self, features: torch.Tensor) -> torch.Tensor:
        """The features of the whole batch, a row for each sample, on every worker.

        For losses over pairs of samples (SimCLR, CLIP): gradients flow back to the workers that the
        rows come from, so the step is that of one process, whether each worker computes the loss of
        the whole batch or the mean loss of its own rows against all. All workers must call it at
        the same points of a step. The rows of this worker begin at `session.first_row`.
        """
        self._between.check_open("session.gather")
        refuse_sharded(self._job.host, "session.gather")
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
        refuse_sharded(self._job.host, "session.evaluation")
        check_dataset(dataset)
        check_options(options)
        sampler = self._between.part_sampler(len(dataset), shuffle=shuffle)
        return DataLoader(dataset, batch_size=batch_size, sampler=sampler, **options)
