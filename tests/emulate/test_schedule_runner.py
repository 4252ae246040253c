"""A schedule applied from a thread."""

from __future__ import annotations

import threading

import pytest

from evenstep.emulate import ScheduleRunner, periodic, steady, step_change


def test_the_first_levels_hold_on_entry_and_the_others_follow() -> None:
    seen: list[tuple[float, ...]] = []
    three = threading.Event()

    def apply(levels: tuple[float, ...]) -> None:
        seen.append(levels)
        if len(seen) == 3:
            three.set()

    with ScheduleRunner(periodic((1.0,), (0.5,), every=0.02, lasts=0.01), apply):
        assert seen[0] == (1.0,)
        assert three.wait(30)
    ended = len(seen)
    assert seen[:3] == [(1.0,), (0.5,), (1.0,)]
    assert len(seen) == ended


def test_exit_does_not_wait_for_later_changes() -> None:
    seen: list[tuple[float, ...]] = []
    with ScheduleRunner(step_change((1.0,), (2.0,), at=1e30), seen.append):
        pass
    with ScheduleRunner(steady((3.0,)), seen.append):
        pass
    assert seen == [(1.0,), (3.0,)]


def test_an_error_in_the_thread_is_raised_on_exit() -> None:
    failed = threading.Event()

    def apply(levels: tuple[float, ...]) -> None:
        if levels == (2.0,):
            failed.set()
            raise OSError("the group is gone")

    with (
        pytest.raises(OSError, match="the group is gone"),
        ScheduleRunner(step_change((1.0,), (2.0,), at=0.001), apply),
    ):
        assert failed.wait(30)
