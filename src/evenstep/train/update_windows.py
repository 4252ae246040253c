"""Detects loops that count batches themselves and so step an optimizer too early.

A batch that is repeated after the loss of a worker is one more iteration of the script's loop. A
loop that counts iterations, say to step an optimizer every fourth time, then steps one batch early
and silently trains differently.
"""

from __future__ import annotations

import torch

from evenstep.errors import EvenstepError
from evenstep.train.job import Job

WAY_OUT = (
    "Count with `for i, batch in session.enumerate(loader)`, in which a repeated batch keeps its "
    "number, or loop over session.accumulate(loader, ...)."
)


class UpdateWindow:
    """The batches between two steps of an optimizer."""

    def __init__(self, num_batches: int, num_void: int) -> None:
        self.num_batches, self.num_void = num_batches, num_void

    def is_early(self, usual: int) -> bool:
        """Whether it has as many iterations as usual, but not as many batches that count."""
        return self.num_void > 0 and self.num_batches + self.num_void == usual


class UpdateWindows:
    """The windows of every optimizer that the script steps."""

    def __init__(self, job: Job) -> None:
        self.is_counted = False  # the script reads the session's own numbers
        self.is_trusted = False  # and counts with nothing else
        self._job = job
        # Batch, void steps and adopted states: before the first batch, and at an optimizer's last
        # update.
        self._begin = -1, 0, 0
        self._last: dict[int, tuple[int, int, int]] = {}
        self._usual: dict[int, int] = {}  # batches in a window without void steps
        self._suspect: dict[int, UpdateWindow] = {}  # seen before the usual number was known
        job.step.on_fetched.append(self._begin_counting)

    def _begin_counting(self) -> None:
        step = self._job.step
        self._begin = step.batch.step - 1, 0, step.num_adopted
        step.on_fetched.remove(self._begin_counting)

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped. Raises if it did so one batch early."""
        key, step = id(optimizer), self._job.step
        last_step, last_void, last_adopted = self._last.get(key, self._begin)
        self._last[key] = step.batch.step, step.num_void, step.num_adopted
        window = UpdateWindow(step.batch.step - last_step, step.num_void - last_void)
        if self.is_trusted or not window.num_batches:  # a second step in the same batch
            return
        if step.num_adopted > last_adopted:  # others made updates that were skipped here
            return
        usual = self._usual.get(key)
        if window.num_void:
            if usual is None:
                self._suspect[key] = window
            elif window.num_batches < usual and self._is_wrong(window, usual):
                raise _early(window, usual)
            return
        if self._job.loader.is_last:  # the last window of an epoch may be shorter
            return
        self._usual[key] = window.num_batches
        if (suspect := self._suspect.pop(key, None)) and suspect.is_early(window.num_batches):
            raise _early(suspect, window.num_batches)
        if not self.is_counted and usual == window.num_batches > 1:
            raise EvenstepError(
                f"this loop steps an optimizer every {usual} batches, and counts them by itself. "
                "Under evenstep run a batch is repeated when a worker is lost, and workers join in "
                f"the middle of an epoch: such a count would be wrong then. {WAY_OUT}"
            )

    def _is_wrong(self, window: UpdateWindow, usual: int) -> bool:
        return window.is_early(usual) or not self._job.loader.is_last


def _early(window: UpdateWindow, usual: int) -> EvenstepError:
    batches = "1 batch" if window.num_batches == 1 else f"{window.num_batches} batches"
    return EvenstepError(
        f"an optimizer stepped after {batches} instead of {usual}, because {window.num_void} had "
        f"to be repeated after the loss of a worker, and the loop counted those again. {WAY_OUT}"
    )
