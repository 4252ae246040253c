"""State of Trainer's loop, handed over to joiners and saved in checkpoints."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

# Of TrainerState: each worker's own, or kept elsewhere here.
NOT_SHARED = (
    "is_local_process_zero",
    "is_world_process_zero",
    "log_history",
    "stateful_callbacks",
)


class TrainerProgress:
    """All workers in the loop update this state alike; only a worker that is behind loads it.

    A worker is behind if it has begun fewer batches than the others have completed: one that is
    still in the last completed batch, while they are in the next, will catch up by itself. Values
    derived from the reduced gradients are always loaded: a worker that missed the gradients cannot
    compute them, but logs them too.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.num_begun = self.num_done = 0  # batches of this worker's loop; done: reduced by all
        self.items = self.loss = 0.0  # of the batches that have accumulated
        self.mean_loss = 0.0  # of the last optimizer step, as are:
        self.grad_norm: Any = 0.0
        self.learning_rate = 0.0
        self._history: tuple[int, str] = (0, "[]")  # entries of the log, and the log as JSON
        self._losses: dict[str, Any] | None = None  # to be set once Trainer has set its own

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        losses = self._losses or {
            # A copy: what is handed over is written into the tensors of the worker that gets it.
            "sum": getattr(trainer, "_tr_loss", torch.zeros(())).clone(),
            "logged": getattr(trainer, "_total_loss_scalar", 0.0),
            "logged_step": getattr(trainer, "_globalstep_last_logged", 0),
            "first_step": getattr(trainer, "_initial_global_step", 0),
        }
        return {
            "batches": self.num_done,
            "sums": [self.items, self.loss],
            "update": [self.mean_loss, float(self.grad_norm), self.learning_rate],
            "state": json.dumps(self._shared_state(), default=float),
            "history": self._log_history(),
            "callbacks": json.dumps([cb.state()["attributes"] for cb in self._exported()]),
            "losses": losses,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items, self.loss = state["sums"]
        self.mean_loss, self.grad_norm, self.learning_rate = state["update"]
        if state["batches"] <= self.num_begun:
            return
        self.num_begun = self.num_done = state["batches"]
        self._losses = state["losses"]
        for name, value in json.loads(state["state"]).items():
            setattr(self._trainer.state, name, value)
        self._trainer.state.log_history = json.loads(state["history"])
        for callback, attributes in zip(
            self._exported(), json.loads(state["callbacks"]), strict=True
        ):
            for name, value in attributes.items():
                setattr(callback, name, value)

    def restore_losses(self) -> None:
        """Trainer has set its sums of losses to zero: set them to those that were loaded."""
        if (losses := self._losses) is None:
            return
        self._losses, trainer = None, self._trainer
        trainer._tr_loss = losses["sum"].to(trainer.args.device, copy=True)
        trainer._total_loss_scalar = losses["logged"]
        trainer._globalstep_last_logged = losses["logged_step"]
        trainer._initial_global_step = losses["first_step"]

    def _shared_state(self) -> dict[str, Any]:
        state = self._trainer.state
        names = [field.name for field in fields(state) if field.name not in NOT_SHARED]
        return {name: getattr(state, name) for name in names}

    def _log_history(self) -> str:
        """The log as text, made anew only when it has grown: this is asked for in every step."""
        history = self._trainer.state.log_history
        if len(history) != self._history[0]:
            self._history = len(history), json.dumps(history, default=float)
        return self._history[1]

    def _exported(self) -> list[ExportableState]:
        callbacks = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [callback for callback in callbacks if isinstance(callback, ExportableState)]
