"""What the script updates in a batch: optimizers, schedulers, and objects that it has registered.

All workers must update the same in the same batches, or their states differ from then on, so the
pulse carries what each of them has updated in the batch before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from evenstep.errors import EvenstepError
from evenstep.train.step import Report, Step
from evenstep.train.update_windows import OPTIMIZER, SCHEDULER, Epochs, UpdateWindows, registered

MAX_BITS = 24  # that single precision holds exactly


class Change(NamedTuple):
    """How a registered object has changed in a batch."""

    numbers: bool = False  # or text: what it counts, say
    tensors: bool = False


UNCHANGED = Change()


class Counts(NamedTuple):
    """Of one batch; -1: unknown."""

    optimizers: int = -1
    schedulers: int = -1
    registered: int = -1  # a bit for each object whose tensors changed, by name


UNKNOWN = Counts()


class Updates:
    """Counts this worker's updates, and compares them with those of the others."""

    def __init__(self, step: Step, loader: Callable[[], Epochs]) -> None:
        self.windows = UpdateWindows(step, loader)
        self.of_framework: set[str] = set()  # registered objects that are a framework's own
        self._step, self._loader = step, loader
        self._num_steps = self._num_scheduled = 0
        self._last, self._last_batch, self._last_adopted = UNKNOWN, -1, 0
        self._registered: Callable[[], Mapping[str, Callable[[], Change]]] = dict
        step.on_fetched.append(self._begin)
        step.on_done.append(self._end)

    def watch(self, found: Callable[[], Mapping[str, Callable[[], Change]]]) -> None:
        """Ask after each batch how registered objects have changed, by name."""
        self._registered = found

    @property
    def last(self) -> Counts:
        """Of the batch before the one in hand."""
        step = self._step
        is_known = (self._last_batch, self._last_adopted) == (step.number - 1, step.num_adopted)
        return self._last if is_known else UNKNOWN

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer, *, may_repeat: bool) -> None:
        """An optimizer has stepped. `may_repeat`: batches, if a worker is lost."""
        self._num_steps += 1
        if may_repeat:
            self.windows.updated(id(optimizer), OPTIMIZER)

    def scheduler_stepped(self, scheduler: Any) -> None:
        """A scheduler has stepped, in a run in which batches may be repeated."""
        self._num_scheduled += 1
        self.windows.updated(id(scheduler), SCHEDULER)

    def _begin(self) -> None:
        self._num_steps = self._num_scheduled = 0

    def _end(self) -> None:
        step = self._step
        bits = self._find_changed()
        self._last = Counts(self._num_steps, self._num_scheduled, bits)
        self._last_batch, self._last_adopted = step.batch.step, step.num_adopted

    def _find_changed(self) -> int:
        """Bits of the registered objects that changed; -1 if that may have been after the loop."""
        watched = {n: f for n, f in self._registered().items() if n not in self.of_framework}
        bits = 0
        for i, name in enumerate(sorted(watched)):
            change = watched[name]()
            if change.tensors:
                bits |= 1 << i % MAX_BITS
            if change != UNCHANGED:
                self.windows.updated(name, registered(name))
        return -1 if watched and (self._step.is_left or self._loader().is_last) else bits

    def check(self, reports: Sequence[Report]) -> None:
        """Raise if ranks have updated different things in the batch before."""
        _check_number("optimizer.step() was called", [r.num_updates for r in reports], self._step)
        _check_number("scheduler.step() was called", [r.num_scheduled for r in reports], self._step)
        self._check_registered([int(r.registered) for r in reports])

    def _check_registered(self, masks: Sequence[int]) -> None:
        known = {rank: mask for rank, mask in enumerate(masks) if mask >= 0}
        names = sorted(self._registered().keys() - self.of_framework)
        for i, name in enumerate(names):
            bit = 1 << i % MAX_BITS
            changed = [str(rank) for rank, mask in known.items() if mask & bit]
            others = [str(rank) for rank, mask in known.items() if not mask & bit]
            if changed and others:
                raise EvenstepError(
                    f"{name!r}, registered with the session, was updated in step "
                    f"{self._step.number - 1} on rank {', '.join(changed)}, but not on rank "
                    f"{', '.join(others)}: it is no longer equal on all workers, and a worker that "
                    f"joins gets any of them. {SAME_BATCHES}"
                )


SAME_BATCHES = (
    "Update it in the same batches on every worker: decide by what all of them know, such as "
    "session.step or session.sum(loss), not by a counter or a loss of one worker."
)


def _check_number(what: str, numbers: Sequence[float], step: Step) -> None:
    """Refuse replicas that have diverged."""
    known = {rank: int(num) for rank, num in enumerate(numbers) if num >= 0}
    if len(set(known.values())) > 1:
        counts = ", ".join(f"{num} on rank {rank}" for rank, num in known.items())
        raise EvenstepError(
            f"{what} a different number of times in step {step.number - 1}: {counts}. The replicas "
            f"are no longer equal. {SAME_BATCHES}"
        )
