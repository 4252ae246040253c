"""Counters of Lightning's loops, handed over to joiners and saved in the run's checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import torch

from evenstep.adapters.lightning.logged import play
from evenstep.train.session import Session

# By these ModelCheckpoint decides whether to write; they are not in its state_dict.
SAVED = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")


class FitProgress:
    """All workers in the loop update this state alike; only a worker that is behind loads it.

    A worker is behind if it has begun fewer batches than the others have completed. Until a batch
    is committed, `state_dict` returns the state before it, since the batch may be repeated.
    """

    def __init__(self, trainer: Any, session: Session) -> None:
        self._trainer, self._session = trainer, session
        self.is_between = True  # no batch is in hand, or the one in hand is not done
        self.is_in_loop = False  # a batch was taken
        self.in_epoch = False  # Lightning's loop is inside of one
        self.has_moved = False  # a state was loaded while it was
        self._is_begun = False  # the batch in hand is not done
        self._before: dict[str, Any] = {}  # the state when it was taken in hand
        self._current: dict[str, Any] | None = None  # counts within the epoch, to be set
        self._synced: dict[str, dict[str, Any]] = {}  # what is logged of all workers, but values
        self._results: dict[str, Any] = {}  # their sums over the epoch, to be set

    @property
    def next_batch(self) -> tuple[int, int]:
        """The epoch and the number in it of the batch that Lightning's loop takes next."""
        fit = self._trainer.fit_loop
        return fit.epoch_progress.current.processed, fit.epoch_loop.batch_progress.current.ready

    def begin_batch(self) -> None:
        """A batch is in hand."""
        self._is_begun = self.is_in_loop = True

    def end_batch(self) -> None:
        """The batch in hand counts. Lightning's loop is not done with it."""
        self._is_begun = self.is_between = False

    def end_loop(self) -> None:
        """Lightning's loop is over, or was ended by an error."""
        self._is_begun, self.is_in_loop, self.is_between = False, False, True

    def played(self, call: dict[str, Any]) -> None:
        """A value was logged."""
        if call["sync_dist"] and call["on_epoch"]:
            self._synced[f"{call['fx']}.{call['name']}"] = call | {"value": 0.0, "batch_size": 1}

    def _epoch_results(self) -> dict[str, Any]:
        if self._current is not None:  # loaded from a checkpoint, and handed on to others
            return self._results
        results = self._trainer.fit_loop.epoch_loop._results
        return {
            key: [call, results[key].value, getattr(results[key], "cumulated_batch_size", None)]
            for key, call in self._synced.items()
            if not results[key].has_reset
        }

    def state_dict(self) -> dict[str, Any]:
        if not self._is_begun:
            trainer = self._trainer
            self._before = {
                "batches": trainer.fit_loop.epoch_loop.batch_progress.total.ready,
                "between": self.is_between,
                "counts": {name: count.state_dict() for name, count in self._counts.items()},
                "logged_steps": trainer.fit_loop.epoch_loop._batches_that_stepped,
                "callbacks": {
                    callback.state_key: state
                    for callback in trainer.callbacks
                    if (state := callback.state_dict())
                },
                "saved": [
                    [getattr(c, name, None) for name in SAVED] for c in trainer.checkpoint_callbacks
                ],
                "metrics": dict(trainer._logger_connector._callback_metrics),
                "results": self._epoch_results(),
                "folders": [
                    str(getattr(c, "dirpath", None) or "") for c in trainer.checkpoint_callbacks
                ],
                "versions": [getattr(log, "_version", None) for log in trainer.loggers],
            }
        return self._before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        fit, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        if not self._session.is_leader:
            self._load_folders(state)
        if state["batches"] <= epoch_loop.batch_progress.total.ready:
            return
        for name, count in self._counts.items():
            count.load_state_dict(copy.deepcopy(state["counts"][name]))
        epoch_loop._batches_that_stepped = state["logged_steps"]
        if not state["between"]:  # the others are in what follows a batch, such as validation
            epoch_loop.batch_progress.total.completed = epoch_loop.batch_progress.total.ready
            epoch_loop.batch_progress.current.completed = epoch_loop.batch_progress.current.ready
            epoch_loop._batches_that_stepped += not epoch_loop._should_accumulate()
        self._results = copy.deepcopy(state["results"])
        self._current = {name: copy.deepcopy(count) for name, count in self._counts.items()}
        if self.in_epoch:
            self.has_moved = True
        else:  # Lightning will count the epoch that it begins
            fit.epoch_progress.total.reset_on_restart()
            fit.epoch_progress.current.reset_on_restart()
        for loop in (fit, epoch_loop, epoch_loop.val_loop):
            loop.on_iteration_done()  # a checkpoint of Lightning's that it was to continue from
        for callback in trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(copy.deepcopy(state["callbacks"][callback.state_key]))
        for callback, values in zip(trainer.checkpoint_callbacks, state["saved"], strict=True):
            for name, value in zip(SAVED, values, strict=True):
                if hasattr(callback, name):
                    setattr(callback, name, value)
        trainer._logger_connector._callback_metrics.update(state["metrics"])

    def restore_current(self) -> None:
        """Lightning has set counts and sums of the epoch to zero: set them to those loaded."""
        if (loaded := self._current) is None:
            return
        self._current, self.has_moved = None, False
        for name, count in self._counts.items():
            if name != "epochs":
                count.load_state_dict(loaded[name].state_dict())
        if self._results:
            self._trainer._logger_connector._first_loop_iter = False  # else they are reset
        results = self._trainer.fit_loop.epoch_loop._results
        for key, (call, value, size) in self._results.items():
            play(results, {**call, "value": torch.zeros_like(value)})
            results[key].value = value
            if size is not None:
                results[key].cumulated_batch_size = size

    def _load_folders(self, state: dict[str, Any]) -> None:
        for callback, folder in zip(
            self._trainer.checkpoint_callbacks, state["folders"], strict=True
        ):
            if folder:
                callback.dirpath = folder
        for log, version in zip(self._trainer.loggers, state["versions"], strict=True):
            if hasattr(log, "_version"):
                log._version = version

    @property
    def _counts(self) -> dict[str, Any]:
        fit = self._trainer.fit_loop
        epoch_loop = fit.epoch_loop
        return {
            "epochs": fit.epoch_progress,
            "batches": epoch_loop.batch_progress,
            "schedulers": epoch_loop.scheduler_progress,
            "optimizers": epoch_loop.automatic_optimization.optim_progress,
            "manual": epoch_loop.manual_optimization.optim_step_progress,
            "validation": epoch_loop.val_loop.batch_progress,
        }
