"""Refuses arguments, optimizers and callbacks of Trainer that would train wrongly."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision

from evenstep.errors import ConfigError


def check_trainer(trainer: Any) -> None:
    """Raise for Trainer arguments that an elastic run cannot support."""
    precision = trainer.strategy.precision_plugin
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        raise ConfigError("precision", "'16-mixed' is not supported: use 'bf16-mixed'")
    if trainer.reload_dataloaders_every_n_epochs:
        raise ConfigError(
            "reload_dataloaders_every_n_epochs",
            "a run has one training set; leave it out",
        )
    if trainer._val_check_time_interval is not None:
        raise ConfigError(
            "val_check_interval",
            "workers' clocks differ, and all must validate after the same batch: give batches",
        )


def check_optimizers(optimizers: list[torch.optim.Optimizer]) -> None:
    """Raise for optimizers that compute gradients themselves."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "LBFGS", "takes several passes in a step, which cannot be repeated here"
            )


def check_callbacks(callbacks: list[Callback]) -> None:
    """Raise for callbacks whose state would not be handed over to joiners."""
    for callback in callbacks:
        if type(callback).on_save_checkpoint is not Callback.on_save_checkpoint:
            raise ConfigError(
                type(callback).__name__,
                "keeps its state in on_save_checkpoint, which workers that join do not get; have "
                "state_dict and load_state_dict return and take it instead",
            )
