"""Learning rates and other optimizer settings: equal on all workers, and when a step is repeated.

A loop that sets a learning rate by a counter of its own counts a repeated batch twice, and begins
anew on a worker that joins. The first would shift the schedule, the second would make that
worker's parameters differ from the others', both in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evenstep.errors import EvenstepError
from evenstep.train.data.random_state import small_digest
from evenstep.train.step import Report, Step

WAY_OUT = (
    "Compute it from what all workers know and a repeated batch does not change, such as "
    "session.step or the sum of a loss, or pass a scheduler to session.prepare."
)
# What scripts and schedules set. Some optimizers keep results in their groups, rounded differently
# on unlike machines.
NAMES = ("lr", "weight_decay", "momentum", "betas")
Settings = tuple[tuple[str, float], ...]


class OptimizerSettings:
    """Learning rates and the like, of all optimizers that the session knows."""

    def __init__(self, step: Step, stateful: Mapping[str, Any]) -> None:
        self._step, self._stateful = step, stateful
        self._last: Settings = ()
        self._digest = 0.0
        self._kept_step = -1
        self._kept: Settings = ()  # of that step, when its gradients were ready
        self._is_first_pass = False
        step.on_fetched.append(self._fetched)

    def _fetched(self) -> None:
        self._is_first_pass = True

    def digest(self) -> float:
        """A number to compare with other workers'. Raises if a repeated step has other settings."""
        settings = self._read()
        if settings != self._last:
            self._last = settings
            # Rounded: a cosine may differ in its last digit between machines.
            self._digest = float(small_digest([(name, f"{x:.6g}") for name, x in settings]))
        if self._is_first_pass:
            self._is_first_pass = False
            self._compare(settings)
        return self._digest

    def step_is_void(self) -> None:
        """Remember what the step had, even if it got no further than its forward pass."""
        if self._is_first_pass:
            self.digest()

    def _compare(self, settings: Settings) -> None:
        step = self._step.batch.step
        if step == self._kept_step and settings != self._kept:
            changes = [
                f"{name} was {before:.6g} and is {now:.6g}"
                for (name, before), (_, now) in zip(self._kept, settings, strict=False)
                if before != now
            ]
            raise EvenstepError(
                f"step {step} is repeated after the loss of a worker, with other optimizer "
                f"settings: {', '.join(changes)}. The loop counts the repeated batch as another "
                f"one. {WAY_OUT}"
            )
        self._kept_step, self._kept = step, settings

    def _read(self) -> Settings:
        return tuple(
            (name, float(number))
            for optimizer in self._stateful.values()
            if isinstance(optimizer, torch.optim.Optimizer)
            for group in optimizer.param_groups
            for name in NAMES
            for number in _numbers(group.get(name))
        )


def check_settings(step: int, reports: Sequence[Report]) -> None:
    """Raise if the optimizers of some ranks have other settings than those of the others."""
    digests = [report.settings_digest for report in reports]
    usual = max(set(digests), key=digests.count)
    others = ", ".join(str(rank) for rank, digest in enumerate(digests) if digest != usual)
    if others:
        raise EvenstepError(
            f"in step {step} the optimizer of rank {others} has another learning rate, or another "
            "setting, than those of the other ranks: the replicas would no longer be equal. "
            f"{WAY_OUT}"
        )


def _numbers(value: Any) -> Sequence[Any]:
    """A setting's numbers, if they are in host memory: reading one from a card takes too long."""
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, torch.Tensor):
        return (value,) if value.device.type == "cpu" else ()
    return () if value is None else (value,)
