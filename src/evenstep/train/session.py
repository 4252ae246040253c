"""The session: what a training process holds while it is part of a run."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from evenstep.config import BatchSettings
from evenstep.decide.learning_rate import global_batch
from evenstep.errors import ConfigError
from evenstep.strict import whole
from evenstep.train.comm.group import await_closed
from evenstep.train.data.evaluation import PartSampler
from evenstep.train.data.loader import Loader, Weight, check_dataset
from evenstep.train.data.order import cut
from evenstep.train.measure.meter import Meter
from evenstep.train.reduce import batch_norm as norm
from evenstep.train.reduce.reducer import Reducer
from evenstep.train.roster.worker_info import facts_of, settings_of
from evenstep.train.step import Stepping
from evenstep.verify.probe import Finished

CLOSE_S = 15.0  # for process groups to be destroyed; on a busy host even milliseconds take long


class Session(Stepping):
    """A worker's part in a run. Use it as a context: `with evenstep.join() as session`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and self._loader is not None:
                self._loader.leave()
            self._left_s = None  # or by that error: how far the step came nobody knows
            # A loop in a generator that is closed has not failed: nobody asks it to go on.
            if error is not None and not isinstance(error, Finished | GeneratorExit):
                self._fail(error)
        finally:
            self.close()

    def close(self) -> None:
        """End this worker's part. The model stays as it is, and all objects are ordinary again."""
        if self._closed:
            return
        self._closed = True
        self._outlook.close()
        if self._reducer is not None:
            self._reducer.close()
        try:
            self._part()
        finally:
            while self._releases:
                self._releases.pop()()
            for group in self._groups:
                group.close()
            self._groups = []
            await_closed(CLOSE_S)

    @property
    def batch(self) -> int:
        """The global batch of the coming step."""
        if self._plans:
            return sum(self.shares_at(self.step))
        return global_batch(self._loader.batch, self.world) if self._loader else 0

    @property
    def samples(self) -> int:
        """Samples that the run has walked through: what a schedule counts in if the batch grows.

        Those that `drop_last` leaves out of an epoch count with it.
        """
        loader = self._loader
        return loader.epoch * loader.order.length + loader.reached if loader else 0

    @property
    def counted(self) -> int:
        """Samples of the batch at hand that count: 0 where it is only a stand-in."""
        return self._report[0]

    def prepare(self, model: torch.nn.Module, *others: Any, sync_batchnorm: bool = False) -> Any:
        """The model and what goes with it, ready for training on all workers.

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
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise ConfigError("model", "is wrapped in DDP already; give the plain module")
        if self._model is not None:
            raise ConfigError(
                "prepare", "was called before; put several models into one torch.nn.ModuleList"
            )
        params = [p for p in model.parameters() if p.requires_grad]
        if not params:
            raise ConfigError("model", "has no trainable parameters: there is nothing to train")
        self._model, self._device = model, params[0].device
        self._meter = Meter(self._device)
        self._reducer = Reducer(
            params,
            on_ready=self._fill_pulse,
            on_reduced=self._read_pulse,
            on_gone=self._gone,
        )
        names = norm.find(model)
        self._sync_norms = bool(names) and sync_batchnorm
        if names and not sync_batchnorm:
            self._local_norms = model
        if self.probe is not None:
            self.probe.watch_model(model, self._reducer)
        for i, other in enumerate(others):
            if isinstance(other, torch.optim.Optimizer):
                self._has_optimizer = True
                self._attach(other)
            if hasattr(other, "state_dict"):
                self._things[f"{type(other).__name__}-{i}"] = other
                self._loss_scale.add(other)
        self._releases.append(lambda: norm.untie(model))
        self._meet(model)
        return (model, *others) if others else model

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Take part in the steps of an optimizer, until the session is closed."""
        before, after = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        self._releases += [
            before(self._check_reduced).remove,
            before(self._check_scaler).remove,
            before(self._before_optimizer_step).remove,  # with the user's rate
            self._rate.attach(optimizer),
            after(self._on_optimizer_step).remove,
        ]

    def loader(
        self,
        dataset: Any,
        *,
        batch: int = 0,
        per_worker: int = 0,
        limit: int = 0,
        weight: Weight | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        **options: Any,
    ) -> Loader:
        """Batches of this worker's share of the global batch; each sample once an epoch.

        The global batch is `batch`, whoever trains; or it grows with the workers, `per_worker` for
        each up to `limit`, and the learning rate with it, by the setting `batch.lr_rule`.
        `weight` gives what a batch's mean loss counts for, where that is not its samples: the
        number of tokens or pixels, say. Further options are those of `DataLoader`.
        """
        if self._loader is not None:
            raise ConfigError("loader", "a session has one; use session.evaluation for others")
        size = BatchSettings(
            size=whole("batch", batch, 0 if per_worker else 1),
            per_worker=whole("per_worker", per_worker, 0),
            limit=whole("limit", limit, 0),
        )
        loader = Loader(
            self,
            dataset,
            batch=size,
            weight=weight,
            seed=self._seed,
            shuffle=shuffle,
            drop_last=drop_last,
            **options,
        )
        self._agree(loader)
        self._loader = loader
        return loader

    def epochs(self, num: int) -> Iterator[int]:
        """Epoch numbers from where the run stands.

        With each of them an epoch begins: what a loop that was left has not used of the one before
        stays unused.
        """
        if self._loader is None:
            raise ConfigError("epochs", "call session.loader(...) first")
        self._num_epochs = num = whole("epochs", num, 0)
        self.enter()
        epoch = self._loader.epoch
        while epoch < num:
            yield epoch
            self._leave_loop()
            self._loader.leave_epoch()
            epoch = max(epoch + 1, self._loader.epoch)  # a spare comes back in a later one
        self._trained()

    def register(self, name: str, thing: Any) -> None:
        """Keep an object with `state_dict` along with the run."""
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise ConfigError(name, "has no state_dict and load_state_dict")
        if isinstance(thing, torch.optim.Optimizer):
            raise ConfigError(name, "is an optimizer: give it to session.prepare(model, ...)")
        if name in self._things:
            raise ConfigError(name, "is registered already; choose another name")
        self._things[name] = thing
        self._loss_scale.add(thing)

    def sum(self, value: torch.Tensor | float) -> torch.Tensor:
        """The sum of a value over all workers. All must ask at the same point."""
        self.check_open("session.sum")
        self.enter()
        self._leave_loop()
        tensor = torch.as_tensor(value).detach()
        mine = tensor.to("cpu", copy=True)  # from a card, this waits for its work
        begun_s = time.perf_counter()
        summed = self._sum(mine)
        self._waited(time.perf_counter() - begun_s)
        return summed.to(tensor.device)

    def evaluation(
        self, dataset: Any, *, batch_size: int, shuffle: bool = False, **options: Any
    ) -> DataLoader[Any]:
        """A loader over this worker's part of a dataset: over all workers each sample once.

        Parts follow the roster and its shares as they are when a loop over it begins, so that all
        finish together. Add up counts with `session.sum`.
        """
        check_dataset(dataset, 1, options)
        sampler = PartSampler(len(dataset), self._enter_evaluation, self._part_of, shuffle=shuffle)
        return DataLoader(dataset, batch_size=batch_size, sampler=sampler, **options)

    def _enter_evaluation(self) -> None:
        """Be part of a generation, with statistics that are one also where a loop was left."""
        self.enter()
        if self._leave_loop():
            Stepping.end_epoch(self)

    def _leave_loop(self) -> bool:
        """If the loop over the loader was left, end its last step, with all that may follow one."""
        if self._left_s is None or self._loader is None:
            return False
        was_step = self.void or self.is_done
        self._loader.leave()
        if was_step:
            self.settle(may_rest=False)
        return True

    def _part_of(self, length: int) -> tuple[int, int]:
        """From where to where this worker's part of a dataset goes."""
        last = self._plans[-1].shares if self._plans else (1,) * self.world
        return cut(length, last)[self.rank]

    def _facts(self, loader: Loader) -> dict[str, Any]:
        return facts_of(loader, self._things, self._device, kind=self._kind, cap=self._cap)

    def _all_settings(self, loader: Loader) -> dict[str, Any]:
        epochs, least = self._num_epochs, self._min_share
        return settings_of(self._settings, loader, num_epochs=epochs, min_share=least)

    # What differs between a fixed roster and one that changes.

    @abstractmethod
    def _meet(self, model: torch.nn.Module) -> None:
        """A model was prepared."""

    @abstractmethod
    def _agree(self, loader: Loader) -> None:
        """A loader was made."""

    @abstractmethod
    def _before_optimizer_step(self, *_: Any) -> None:
        """An optimizer is about to step."""

    @abstractmethod
    def _trained(self) -> None:
        """All epochs are over."""

    @abstractmethod
    def _fail(self, error: BaseException) -> None:
        """The user's script raised."""

    @abstractmethod
    def _part(self) -> None:
        """Leave."""
