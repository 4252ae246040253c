"""Lightning's loops: a training step is repeated inside of them until it is committed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from lightning.pytorch.loops.optimization.automatic import Closure, _AutomaticOptimization
from lightning.pytorch.loops.optimization.closure import AbstractClosure
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from evenstep.adapters.epoch import MovedError
from evenstep.adapters.lightning.collectives import leaders
from evenstep.adapters.lightning.evaluation import EvaluationLoop
from evenstep.adapters.lightning.logged import Logged, check_value, of_all_workers, play
from evenstep.adapters.lightning.progress import FitProgress
from evenstep.train.session import Session

T = TypeVar("T")


class Attempts:
    """Repeats forward and backward on the current batch until the step is not void."""

    def __init__(
        self, trainer: Any, session: Session, progress: FitProgress, on_done: Callable[[], None]
    ) -> None:
        self._trainer, self.session, self.progress = trainer, session, progress
        self._on_done = on_done

    def __call__(self, compute: Callable[[], T], kwargs: OrderedDict[str, Any], counts: Any) -> T:
        """The result of `compute`, forward and backward on `kwargs["batch"]`.

        Counts and logs of void attempts are discarded.
        """
        results = self._trainer.fit_loop.epoch_loop._results
        first, before = kwargs["batch"], counts.state_dict()
        calls: list[dict[str, Any]] = []

        def put(call: dict[str, Any]) -> None:
            check_value(call)
            calls.append(call)

        def attempt(batch: Any) -> T:
            nonlocal calls
            if batch is not first:
                kwargs["batch"] = results.batch = self._to_device(batch)
                results.batch_size = None
                counts.load_state_dict(before)
            calls = []
            with Logged(results, put):
                result = compute()
            calls = of_all_workers(self.session.sum, self.session.counted, calls)
            return result

        result = self.session.attempt(attempt, first)
        self.progress.end_batch()
        self._on_done()
        for call in calls:
            play(results, call)
            self.progress.played(call)
        return result

    def _to_device(self, batch: Any) -> Any:
        trainer = self._trainer
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


class RepeatedClosure(AbstractClosure[Any]):
    """Lightning's closure, repeated while the step is void."""

    def __init__(self, closure: Closure, attempt: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._closure, self._attempt = closure, attempt

    def closure(self, *args: Any, **kwargs: Any) -> Any:
        return self._attempt(self._closure.closure)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._result = self.closure()
        return self._result.loss


class Automatic(_AutomaticOptimization):
    """Forward and backward in `training_step` and Lightning's closure."""

    attempts: Attempts

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        closure = super()._make_closure(kwargs, optimizer, batch_idx)
        return RepeatedClosure(
            closure, lambda compute: self.attempts(compute, kwargs, self.optim_progress)
        )


class Manual(_ManualOptimization):
    """The whole of a `training_step` that calls backward and optimizers itself."""

    attempts: Attempts

    def advance(self, kwargs: Any) -> None:
        advance = super().advance
        self.attempts(lambda: advance(kwargs), kwargs, self.optim_step_progress)


class EpochLoop(_TrainingEpochLoop):
    """An epoch, begun at the run's current batch."""

    attempts: Attempts

    def run(self, data_fetcher: Any) -> None:
        progress = self.attempts.progress
        progress.in_epoch = True
        try:
            while True:
                try:
                    super().run(data_fetcher)
                    return
                except MovedError:
                    iter(data_fetcher)
        finally:
            progress.in_epoch = False

    def reset(self) -> None:
        super().reset()
        self.attempts.progress.restore_current()

    def _get_monitor_value(self, key: str) -> Any:
        """The leader's: learning rates must not differ between workers."""
        value = super()._get_monitor_value(key)
        return None if value is None else leaders(self.attempts.session, float(value))


def install(trainer: Any, attempts: Attempts) -> None:
    """Let Trainer's own loops, which the script may have configured, be of these kinds."""
    epoch_loop = trainer.fit_loop.epoch_loop
    for loop, kind in (
        (epoch_loop, EpochLoop),
        (epoch_loop.automatic_optimization, Automatic),
        (epoch_loop.manual_optimization, Manual),
    ):
        loop.__class__ = kind
        loop.attempts = attempts
    epoch_loop.val_loop.__class__ = EvaluationLoop
    epoch_loop.val_loop.open = []
