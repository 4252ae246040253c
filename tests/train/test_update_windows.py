"""Which windows of batches show that a loop counts repeated batches, and which do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from evenstep.errors import EvenstepError
from evenstep.train.step import Batch, Step
from evenstep.train.update_windows import UpdateWindows

OPTIMIZER = cast(torch.optim.Optimizer, object())


class Loop:
    """A loop that reads `session.step`, with an epoch of ten batches."""

    def __init__(self) -> None:
        self.step, self.loader = Step(), SimpleNamespace(is_last=False)
        job: Any = SimpleNamespace(step=self.step, loader=self.loader)
        self.windows = UpdateWindows(job)
        self.windows.is_counted = True
        self.number = -1

    def update_after(self, num_batches: int, num_void: int = 0) -> None:
        """Step an optimizer after so many batches that count, and so many repeated ones."""
        for _ in range(num_batches):
            self.number += 1
            self.step.fetched(Batch(step=self.number, samples=1), 0.0)
        self.step.num_void += num_void
        self.loader.is_last = self.number % 10 == 9
        self.windows.updated(OPTIMIZER)


def test_a_window_that_is_short_by_its_repeated_batches_is_refused() -> None:
    loop = Loop()
    loop.update_after(4)
    with pytest.raises(EvenstepError, match="after 3 batches instead of 4"):
        loop.update_after(3, num_void=1)


def test_the_first_window_is_judged_by_the_next() -> None:
    loop = Loop()
    loop.update_after(3, num_void=1)
    with pytest.raises(EvenstepError, match="after 3 batches instead of 4"):
        loop.update_after(4)


def test_a_window_that_ends_before_the_epoch_is_refused() -> None:
    """By `i + 1 == len(loader)`, with `i` from the built-in `enumerate`."""
    loop = Loop()
    loop.update_after(4)
    loop.update_after(4)
    with pytest.raises(EvenstepError, match="after 1 batch instead of 4"):
        loop.update_after(1, num_void=1)


def test_the_short_window_at_the_end_of_an_epoch_is_not_the_usual_one() -> None:
    loop = Loop()
    for num_batches in (4, 4, 2):
        loop.update_after(num_batches)
    loop.update_after(4, num_void=1)  # repeated, and counted rightly
    with pytest.raises(EvenstepError, match="after 3 batches instead of 4"):
        loop.update_after(3, num_void=1)


def test_a_window_that_is_longer_than_usual_is_no_miscount() -> None:
    """As where batches with infinite gradients are skipped."""
    loop = Loop()
    loop.update_after(1)
    loop.update_after(2, num_void=1)


def test_a_window_whose_update_came_from_others_is_not_the_usual_one() -> None:
    """The step was void here but not on others; their state includes its update."""
    loop = Loop()
    loop.update_after(1)
    loop.number += 1
    loop.step.fetched(Batch(step=loop.number, samples=1), 0.0)
    loop.step.void()
    loop.step.adopt()
    loop.update_after(1)
    loop.update_after(1, num_void=1)
    loop.update_after(1)
