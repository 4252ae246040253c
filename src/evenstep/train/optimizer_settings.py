"""Checks that learning rates and the like are equal on all workers, and in a repeated step.

A loop that sets a learning rate by its own counter counts a repeated batch twice, and starts over
on a worker that joins. The first shifts the schedule, the second makes that worker's parameters
differ from the others', both silently. In a resumed run the counters of all workers start over: the
settings of step 0 come back, which is how it is told from a schedule.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from evenstep.errors import EvenstepError
from evenstep.train.data.random_state import small_digest
from evenstep.train.step import Batch, Report, Step

log = logging.getLogger("evenstep")

WAY_OUT = (
    "Compute it from what all workers know and a repeated batch does not change, such as "
    "session.step or the sum of a loss. Or pass a scheduler to session.prepare and step it with "
    "every batch, after every epoch, or by the numbers of session.enumerate(loader)."
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
        self._compared: Batch | None = None  # the batch whose first pass was compared last
        self._first: Settings = ()  # of the run's step 0
        self._resumed_from: Settings = ()  # of the step before the one at which this worker began
        step.on_void.append(self._step_is_void)

    def digest(self) -> float:
        """A number to compare with other workers'. Raises if a repeated step has other settings."""
        settings = self._read()
        if settings != self._last:
            self._last = settings
            # Rounded: a cosine may differ in its last digit between machines.
            self._digest = float(small_digest([(name, f"{x:.6g}") for name, x in settings]))
        if self._compared is not self._step.batch:
            self._compared = self._step.batch
            self._compare(settings)
        return self._digest

    def _step_is_void(self) -> None:
        """Remember what the step had, even if it got no further than its forward pass."""
        if self._step.has_batch and self._compared is not self._step.batch:
            self.digest()

    def warn_if_begun_anew(self) -> None:
        """In the first step of a resumed run: whether the script began a counter of its own anew.

        Only a warning: a schedule by `session.step` may come back to where it began, too.
        """
        before, self._resumed_from = self._resumed_from, ()
        has_scheduler = any(isinstance(thing, LRScheduler) for thing in self._stateful.values())
        if before and not has_scheduler and self._kept == self._first != before:
            log.warning(
                "step %d of the resumed run has the optimizer settings of step 0 again (%s). If "
                "the script computes them from a counter of its own, that began anew. %s",
                *(self._kept_step, _changes(before, self._kept), WAY_OUT),
            )

    def state_dict(self) -> dict[str, Any]:
        return {"first": list(map(list, self._first)), "last": list(map(list, self._kept))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        first, last = (tuple((name, x) for name, x in state[key]) for key in ("first", "last"))
        self._first = first
        if self._kept_step < 0:  # it has not trained yet
            self._resumed_from = last

    def _compare(self, settings: Settings) -> None:
        step = self._step.batch.step
        is_repeated = step == self._kept_step
        if is_repeated and settings != self._kept:
            raise EvenstepError(
                f"step {step} is repeated after the loss of a worker, with other optimizer "
                f"settings: {_changes(self._kept, settings)}. The loop counts the repeated batch "
                f"as another one. {WAY_OUT}"
            )
        if self._kept_step >= 0 and not is_repeated:
            self._resumed_from = ()
        self._kept_step, self._kept = step, settings
        if step == 0:
            self._first = settings

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


def _changes(before: Settings, now: Settings) -> str:
    return ", ".join(
        f"{name} was {old:.6g} and is {new:.6g}"
        for (name, old), (_, new) in zip(before, now, strict=False)
        if old != new
    )


def _numbers(value: Any) -> Sequence[Any]:
    """A setting's numbers, if they are in host memory: reading one from a GPU would block."""
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, torch.Tensor):
        return (value,) if value.device.type == "cpu" else ()
    return () if value is None else (value,)
