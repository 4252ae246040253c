"""Which windows of batches show that a loop counts repeated batches, and which do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from evenstep.errors import EvenstepError
from evenstep.train.step import Batch, Step
from evenstep.train.update_windows import OPTIMIZER, Update, UpdateWindows, registered


class Loop:
    """A loop that reads `session.step`, with an epoch of ten batches."""

    def __init__(self) -> None:
        self.step, self.loader = Step(), SimpleNamespace(is_last=False, epoch=0)
        self.windows = UpdateWindows(self.step, lambda: cast(Any, self.loader))
        self.windows.is_counted = True
        self.number = -1

    def update_after(self, num_batches: int, num_void: int = 0, update: Update = OPTIMIZER) -> None:
        """Step an optimizer after so many batches that count, and so many repeated ones."""
        for _ in range(num_batches):
            self.number += 1
            self.step.fetched(Batch(step=self.number, samples=1), 0.0)
        self.step.num_void += num_void
        self.loader.is_last = self.number % 10 == 9
        self.loader.epoch = self.number // 10
        self.windows.updated(update.did, update)


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


def test_a_window_in_which_the_update_fell_into_the_void_step_is_refused() -> None:
    """It was skipped there, and the count goes on to the next multiple."""
    loop = Loop()
    loop.update_after(3)
    loop.update_after(3)
    with pytest.raises(EvenstepError, match="after 5 batches instead of 3"):
        loop.update_after(5, num_void=1)


def test_such_a_window_is_judged_by_those_after_it() -> None:
    loop = Loop()
    loop.update_after(5, num_void=1)
    loop.update_after(2)
    with pytest.raises(EvenstepError, match="after 5 batches instead of 2"):
        loop.update_after(2)


AVERAGE = registered("average")


def test_a_regular_update_of_a_registered_object_is_a_count() -> None:
    loop = Loop()
    loop.windows.is_counted = False
    for _ in range(3):
        loop.update_after(4, update=AVERAGE)
    with pytest.raises(EvenstepError, match="this loop updates 'average' every 4 batches"):
        loop.update_after(4, update=AVERAGE)


def test_an_update_that_depends_on_the_data_is_no_count() -> None:
    """As of the best state so far."""
    loop = Loop()
    loop.windows.is_counted = False
    for num_batches in (1, *[2] * 9):
        loop.update_after(num_batches, update=AVERAGE)
    loop.update_after(1, num_void=1, update=AVERAGE)


def test_a_count_beside_that_of_the_session_is_refused_once_it_is_wrong() -> None:
    """As an average by a counter of its own in a loop over session.enumerate."""
    loop = Loop()
    loop.windows.is_trusted = True
    for _ in range(3):
        loop.update_after(2, update=AVERAGE)
    with pytest.raises(EvenstepError, match="'average' was updated after 1 batch instead of 2"):
        loop.update_after(1, num_void=1, update=AVERAGE)


def test_the_sessions_own_count_begins_anew_with_each_epoch() -> None:
    """By `(i + 1) % 3 == 0`: a window of four crosses into the second epoch of ten batches."""
    loop = Loop()
    loop.windows.is_trusted = True
    for num_batches in (3, 3, 3):
        loop.update_after(num_batches)
    loop.update_after(4, num_void=2)
    loop.update_after(3, num_void=1)
