"""Checks on the steps of optimizers, and what they mean for the training step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from evenstep.errors import ConfigError, EvenstepError
from evenstep.train.reduce.loss_scale import stepping_scaler
from evenstep.train.replica import Replica

log = logging.getLogger("evenstep")

FORGOTTEN = 200  # batches without any optimizer step, after which something is likely wrong


class OptimizerHooks:
    """Attached to every optimizer that was given to `session.prepare`."""

    def __init__(
        self, replica: Replica, *, hands_over_state: bool, is_leader: Callable[[], bool]
    ) -> None:
        self._replica, self._is_leader = replica, is_leader
        self._hands_over_state = hands_over_state
        self._has_any = self._warned = False
        replica.step.on_committed.append(self._check_used)

    def attach(self, optimizer: torch.optim.Optimizer) -> list[Callable[[], None]]:
        """Take part in the steps of an optimizer. Returns functions that detach it."""
        self._has_any = True
        before, after = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        return [
            before(self._check_reduced).remove,
            before(self._check_scaler).remove,
            self._replica.lr_scale.attach(optimizer),
            after(self._stepped).remove,
        ]

    def _check_reduced(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        model = self._replica.model
        model.reducer.check_known(optimizer, model.module)

    def _check_scaler(self, *_: Any) -> None:
        scaler, loss_scale = stepping_scaler(), self._replica.loss_scale
        if scaler is None or loss_scale.knows(scaler):
            return
        if not self._hands_over_state:
            loss_scale.add(scaler)
        elif scaler.is_enabled():  # a disabled one has no state
            raise ConfigError(
                "scaler",
                "this GradScaler was not passed to session.prepare: joining workers would start "
                "with another scale, and a repeated step would update it twice. Use "
                "session.prepare(model, optimizer, scaler)",
            )

    def _stepped(self, *_: Any) -> None:
        self._replica.step.num_unused = 0

    def _check_used(self) -> None:
        """Notice a missing optimizer or a missing `optimizer.step()`: gradients pile up."""
        if self._replica.step.num_unused <= FORGOTTEN or self._warned:
            return
        if not self._has_any:
            raise EvenstepError(
                f"session.prepare was given no optimizer, and {FORGOTTEN} batches have passed. "
                "Pass it to prepare along with the model, and call optimizer.step()."
            )
        self._warned = True
        if self._is_leader():
            log.warning(
                "no optimizer passed to session.prepare has taken a step in %d batches. Unless you "
                "accumulate gradients on purpose, pass the optimizer to prepare and call "
                "optimizer.step().",
                FORGOTTEN,
            )
