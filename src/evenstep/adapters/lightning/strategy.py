"""The strategy: Trainer as a worker of a run.

Lightning owns the loop and counts in it. So a training step is repeated inside of the loop when a
worker was lost (`loops.py`), and a batch of the script's DataLoader is shared out to all workers:
the run is that of one process with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.utilities import _log_hyperparams
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from evenstep.adapters.lightning.batches import FitBatches, make_loader
from evenstep.adapters.lightning.collectives import add_up, leaders
from evenstep.adapters.lightning.device import own_device
from evenstep.adapters.lightning.evaluation import SharedBatches
from evenstep.adapters.lightning.loops import Attempts, install
from evenstep.adapters.lightning.progress import FitProgress
from evenstep.adapters.lightning.wrong_use import (
    check_callbacks,
    check_optimizers,
    check_trainer,
)
from evenstep.errors import ConfigError
from evenstep.train.join import join
from evenstep.train.session import Session


class Strategy(SingleDeviceStrategy):
    """For `Trainer(strategy=evenstep.adapters.lightning.Strategy())`.

    `device` is this worker's, by default its first card if it has one. `weight` and
    `sync_batchnorm` are those of `session.loader` and `session.prepare`; further arguments are
    those of `evenstep.join`, such as `cap=16`.
    """

    strategy_name = "evenstep"

    def __init__(
        self,
        device: Any = None,
        *,
        weight: Callable[[Any], float] | None = None,
        sync_batchnorm: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(device=own_device() if device is None else device)
        self._weight, self._sync_batchnorm, self._join_options = weight, sync_batchnorm, options
        self._session: Session | None = None
        self._trainer: Any = None
        self._batches: FitBatches | None = None
        self._progress: FitProgress

    def __repr__(self) -> str:
        """Fabric quotes it, when it is given this one."""
        return "Strategy() for Trainer; Fabric needs evenstep.adapters.lightning.FabricStrategy()"

    @property
    def session(self) -> Session:
        """This worker's part in the run, while `Trainer.fit` runs."""
        if self._session is None:
            raise ConfigError("session", "there is one only while Trainer.fit runs")
        return self._session

    @property
    def is_distributed(self) -> bool:
        """Whether `sync_dist=True` is not to be ignored."""
        return self._session is not None

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker writes checkpoints and logs."""
        return self.global_rank == 0

    # Before the first batch.

    def setup_environment(self) -> None:
        super().setup_environment()
        trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return
        check_trainer(trainer)
        trainer._accelerator_connector.use_distributed_sampler = False  # `FitBatches` share out
        self._trainer, self._session = trainer, join(**self._join_options)
        self._progress = FitProgress(trainer, self._session)
        install(trainer, Attempts(trainer, self._session, self._progress, self._show_rank))
        # Nobody writes before ranks are known.
        self._set_rank(self._session.rank if self._session.generation else 1)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        check_optimizers(self.optimizers)
        if not self.session.generation:  # workers may join
            check_callbacks(trainer.callbacks)
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        self.session.prepare(
            self.lightning_module,
            *self.optimizers,
            *schedulers,
            sync_batchnorm=self._sync_batchnorm,
        )
        self.session.register("trainer", self._progress)
        self.session.framework.owns("trainer")

    def process_dataloader(self, dataloader: Any) -> Any:
        if self._session is None:
            return dataloader
        if not self._trainer.training:
            loop = self._trainer.fit_loop.epoch_loop.val_loop
            return SharedBatches(dataloader, loop, self._session_in_loop)
        if self._batches is not None:
            raise ConfigError(
                "train_dataloader",
                "give one DataLoader, and leave out reload_dataloaders_every_n_epochs",
            )
        loader = make_loader(self._session, dataloader, self._weight)
        self._batches = FitBatches(loader, self._progress)
        return self._batches

    @property
    def _is_in_loop(self) -> bool:
        """Whether this worker has taken a batch: it is where the others are."""
        return self._session is not None and self._progress.is_in_loop

    def _session_in_loop(self) -> Session | None:
        return self._session if self._is_in_loop else None

    def on_train_start(self) -> None:
        """Everything that has a state is made by now: take over that of the run."""
        trainer, session = self._trainer, self.session
        if trainer.fit_loop._combined_loader.iterables is not self._batches:
            raise ConfigError("train_dataloader", "give one DataLoader, not a collection of them")
        trainer._signal_connector.teardown()  # SIGTERM is evenstep's notice that a worker leaves
        session.framework.enter()
        led = self.is_global_zero
        self._set_rank(session.rank)
        if self.is_global_zero and not led:
            _log_hyperparams(trainer)
            self._show_progress()

    # The loop.

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Forward and backward first: an optimizer step that is begun cannot be repeated."""
        if self._session is not None:
            loss = closure()

            def closure() -> Any:
                return loss

        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _show_rank(self) -> None:
        """After a batch: the roster may have changed, and this worker may lead now."""
        led, session = self.is_global_zero, self.session
        self._set_rank(session.rank)
        if self.is_global_zero and not led:
            for logger in self._trainer.loggers:
                if isinstance(logger, CSVLogger) and logger._experiment is None:
                    logger._version = None  # a new folder: it would delete what is in the old one
            self._show_progress()

    def _set_rank(self, rank: int) -> None:
        self.global_rank = rank_zero_only.rank = rank
        self.world_size = max(self.session.world, rank + 1)

    def _show_progress(self) -> None:
        bar = self._trainer.progress_bar_callback
        if bar is not None and bar.is_disabled:
            bar.enable()
            bar.on_train_start(self._trainer, self.lightning_module)

    # Collectives. Outside of the loop each worker is on its own: others are elsewhere.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not self._is_in_loop or not isinstance(tensor, torch.Tensor):
            return tensor
        operation = str(reduce_op).lower().rpartition(".")[2]
        if operation not in ("mean", "avg", "sum"):
            raise ConfigError("reduce_op", f"{reduce_op} is not supported: use 'mean' or 'sum'")
        values = torch.cat([tensor.detach().double().reshape(-1).cpu(), torch.ones(1)])
        *total, world = add_up(self.session, values).tolist()
        scale = 1.0 if operation == "sum" else 1.0 / world
        kind = tensor.dtype if tensor.is_floating_point() else torch.float32
        result = torch.tensor(total, dtype=torch.float64, device=tensor.device) * scale
        return result.reshape(tensor.shape).to(kind)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if not self._is_in_loop:
            return decision
        votes, world = add_up(self.session, torch.tensor([float(decision), 1.0])).tolist()
        return bool(votes == world if all else votes)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return leaders(self.session, obj) if self._is_in_loop else obj

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        if not self._is_in_loop:
            return tensor
        raise ConfigError(
            "all_gather",
            "workers may be lost meanwhile: log with self.log(..., sync_dist=True), or use "
            "trainer.strategy.session.gather in training_step and session.sum elsewhere",
        )

    # The end.

    def on_exception(self, exception: BaseException) -> None:
        self._close(exception)

    def teardown(self) -> None:
        self._close(None)
        super().teardown()

    def _close(self, error: BaseException | None) -> None:
        if (session := self._session) is None:
            return
        self._progress.end_loop()
        self._session = self._batches = None
        session.__exit__(type(error) if error else None, error, None)
