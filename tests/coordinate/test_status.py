"""How fast a run is, by what is told of its steps."""

from __future__ import annotations

from evenstep.coordinate.state import OVERDUE, RECENT_S, Throughput
from evenstep.types import Steps


def steps(num: int, seconds: float) -> Steps:
    """So many steps of 64 samples, and of so many seconds each."""
    return Steps(num=num, seconds=num * seconds, samples=num * 64)


def test_steps_told_together_count_as_many() -> None:
    run = Throughput()
    run = run.add(0.1, 1, steps(1, 0.1))
    run = run.add(4.0, 1, steps(39, 0.1))
    run = run.add(4.8, 1, steps(2, 0.4))
    assert run.samples_per_s(4.8, 1) == round(42 * 64 / 4.8, 1)


def test_steps_of_long_ago_do_not_count() -> None:
    run = Throughput()
    run = run.add(1.0, 1, steps(10, 0.1))
    run = run.add(2.0 + RECENT_S, 1, steps(1, 1.0))
    assert run.samples_per_s(2.0 + RECENT_S, 1) == 64.0


def test_of_long_steps_the_newest_counts() -> None:
    run = Throughput()
    run = run.add(6 * RECENT_S, 1, steps(1, 6 * RECENT_S))
    run = run.add(10 * RECENT_S, 1, steps(1, 4 * RECENT_S))
    assert run.samples_per_s(12 * RECENT_S, 1) == round(64 / (4 * RECENT_S), 1)


def test_a_run_that_stands_still_has_no_throughput() -> None:
    run = Throughput()
    assert run.samples_per_s(0.0, 0) == 0.0
    run = run.add(4.0, 1, steps(1, 4.0))
    assert run.samples_per_s(4.0 + OVERDUE * 4.0, 1) == 16.0
    assert run.samples_per_s(5.0 + OVERDUE * 4.0, 1) == 0.0


def test_steps_of_another_generation_are_forgotten() -> None:
    run = Throughput()
    run = run.add(1.0, 1, steps(10, 0.1))
    assert run.samples_per_s(1.0, 2) == 0.0
    run = run.add(2.0, 2, steps(1, 1.0))
    assert run.samples_per_s(2.0, 2) == 64.0
