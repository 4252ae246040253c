"""What a script can ask about its speed, from the steps of all ranks."""

from __future__ import annotations

import pytest

from evenstep.train.measure.throughput import NUM_STEPS, RecentSteps
from evenstep.train.step import Batch, Report, Step


def take(step: Step, shares: tuple[int, ...], each_s: tuple[float, ...], beyond_s: float) -> None:
    """A committed step: the time per sample of every rank, and what it takes beyond them."""
    step.fetched(Batch(step=step.number, samples=shares[0], total=sum(shares)), 0.0)
    compute_s = [n * s for n, s in zip(shares, each_s, strict=True)]
    reports = [
        Report(samples=n, compute_s=t, wait_s=0.0, free_cpu=1.0, free_memory=1.0, weight=n)
        for n, t in zip(shares, compute_s, strict=True)
    ]
    step.reduced(reports, None)
    step.seconds = max(compute_s) + beyond_s
    for listener in step.on_committed:
        listener()
    step.number += 1


def test_before_the_first_step_nothing_is_known() -> None:
    recent = RecentSteps(Step())
    assert recent.samples_per_s == 0.0
    assert recent.estimate() is None


def test_uneven_ranks_with_equal_shares_are_below_the_limit() -> None:
    step = Step()
    recent = RecentSteps(step)
    for shares in [(30, 30)] * 5 + [(20, 40)] * 2 + [(30, 30)] * 5:
        take(step, shares, (0.02, 0.01), 0.1)
    assert recent.samples_per_s == pytest.approx(12 * 60 / (10 * 0.7 + 2 * 0.5))
    found = recent.estimate()
    assert found is not None
    assert found.limit == pytest.approx(60 / 0.5, rel=0.1)
    assert found.speedup == pytest.approx(1.0, rel=0.02)
    assert found.part_of_limit == pytest.approx(0.5 / 0.7, rel=0.1)


def test_the_best_shares_are_at_the_limit_and_faster_than_equal_ones() -> None:
    step = Step()
    recent = RecentSteps(step)
    for shares in [(30, 30)] * 3 + [(20, 40)] * 30:
        take(step, shares, (0.02, 0.01), 0.0)
    found = recent.estimate()
    assert found is not None
    assert found.part_of_limit == pytest.approx(1.0, abs=0.02)
    assert found.speedup == pytest.approx(1.5, rel=0.05)


def test_steps_of_another_number_of_workers_and_old_ones_do_not_count() -> None:
    step = Step()
    recent = RecentSteps(step)
    for _ in range(5):
        take(step, (30, 30), (0.1, 0.1), 0.0)
    for _ in range(NUM_STEPS + 5):
        take(step, (20, 20, 20), (0.01, 0.01, 0.01), 0.0)
    assert recent.samples_per_s == pytest.approx(300.0)


def test_a_rank_without_a_share_does_not_matter() -> None:
    step = Step()
    recent = RecentSteps(step)
    for _ in range(5):
        take(step, (60, 0), (0.01, 0.01), 0.0)
    found = recent.estimate()
    assert found is not None
    assert found.measured == pytest.approx(100.0)
