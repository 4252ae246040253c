"""A run's figures in Weights & Biases: `evenstep run --sink wandb:PROJECT train.py`."""

from __future__ import annotations

from collections.abc import Mapping

import wandb


class WandbSink:
    """One run of a project; a run that is resumed becomes another one."""

    def __init__(self, project: str) -> None:
        self._run = wandb.init(project=project or None)

    def write(self, unix_s: float, step: int, figures: Mapping[str, float]) -> None:
        """The figures of a step."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()
