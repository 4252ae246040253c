"""Points of step-time curves: noise, change, drift and warm-up are distinguished."""

from __future__ import annotations

import numpy as np
import pytest

from evenstep.decide.curve_points import (
    ALIKE_SIGMAS,
    SLOTS,
    CurvePoints,
    learn,
    shrink_to_kind,
)
from evenstep.types import Fleet, FloatArray, Outcome, Worker

FLEET = Fleet.of([Worker(id="w")], batch=100)


def learned(
    *times: tuple[int, float], points: CurvePoints | None = None, spread_s: float = 0.0
) -> CurvePoints:
    """The points of one worker after these (share, seconds), or means with a spread."""
    points = points or CurvePoints.empty().carried_over(FLEET, 0.03)
    for step, (share, seconds) in enumerate(times):
        outcome = Outcome(
            step=step,
            samples=np.array([share]),
            compute_s=np.array([seconds if share else np.nan]),
            forecast_samples_per_s=np.array([np.nan]),
            spread_s=np.array([spread_s]),
        )
        points = learn(points, points.with_guesses(FLEET, 100).curves(0.1), outcome)
    return points


def seconds_at(points: CurvePoints, share: int) -> float:
    near = np.abs(points.share[0] - share) < 0.5
    return float(points.seconds[0][near & (points.weight[0] > 0)][0])


def test_times_at_one_share_are_averaged() -> None:
    points = learned((8, 1.0), *[(8, 1.04), (8, 0.96)] * 30)
    assert seconds_at(points, 8) == pytest.approx(1.0, abs=0.02)


def test_a_new_share_is_a_new_point_and_the_old_ones_stay() -> None:
    points = learned((8, 1.0), (8, 1.0), (16, 1.5))
    assert seconds_at(points, 8) == pytest.approx(1.0)
    assert seconds_at(points, 16) == pytest.approx(1.5)


def test_a_change_at_a_known_share_rescales_every_point() -> None:
    points = learned((4, 1.0), *[(8, 2.0)] * 4, (8, 6.0))
    assert seconds_at(points, 8) == pytest.approx(6.0, rel=1e-3)
    assert seconds_at(points, 4) == pytest.approx(3.0, rel=1e-3)
    assert points.last_jump[0] == pytest.approx(np.log(3), rel=1e-3)


def test_the_spread_of_averaged_steps_counts_as_noise_of_a_single_step() -> None:
    scattered = learned(*[(8, 1.0)] * 20, spread_s=0.1)
    assert learned((8, 1.3), points=scattered).last_jump[0] == 0
    even = learned(*[(8, 1.0)] * 20)
    assert learned((8, 1.3), points=even).last_jump[0] > 0


def test_an_error_too_large_for_a_new_share_is_a_change() -> None:
    points = learned((10, 1.2), *[(8, 1.0)] * 4, (9, 9.0))
    assert points.last_jump[0] > 1


def test_a_faster_second_step_at_a_share_replaces_the_first() -> None:
    points = learned(*[(8, 1.0)] * 4, (16, 1.7), (16, 1.2))
    assert seconds_at(points, 16) == pytest.approx(1.2)
    assert seconds_at(points, 8) == pytest.approx(1.0)
    assert points.last_jump[0] == 0


def test_a_slow_first_step_at_the_largest_share_yet_is_ignored() -> None:
    points = learned(*[(8, 1.0)] * 4, (10, 9.0))
    assert points.last_jump[0] == 0
    assert points.warmup_cost[0] > 0.9
    assert 10 not in points.share[0]
    points = learned((10, 9.0), points=points)  # it persists: a change, not warm-up
    assert points.last_jump[0] > 1


def test_the_warmup_cost_decays_when_larger_shares_have_none() -> None:
    points = learned(*[(8, 1.0)] * 4, (10, 9.0), (10, 1.2), (12, 1.4), (14, 1.6), (16, 1.8))
    assert points.warmup_cost[0] < 0.2
    assert learned((8, 3.0), (8, 1.0)).warmup_cost[0] == pytest.approx(np.log(3))


def test_a_change_after_frequent_warmup_costs_needs_a_second_step() -> None:
    before = [*[(8, 1.0)] * 4, (10, 4.0), (10, 1.2), (12, 4.0), (12, 1.4)]
    points = learned(*before, (8, 2.0))
    assert points.last_jump[0] == 0
    assert learned((8, 2.0), points=points).last_jump[0] > 0.5  # it lasts
    assert learned(*before[:4], (8, 2.0)).last_jump[0] > 0.5


def test_drift_is_followed_and_noise_is_not() -> None:
    drift = [(8, 1.0 + 0.01 * i) for i in range(60)]
    assert seconds_at(learned(*drift), 8) == pytest.approx(1.59, rel=0.03)
    rng = np.random.default_rng(0)
    noise = [(8, float(np.exp(rng.normal(0, 0.05)))) for _ in range(200)]
    assert seconds_at(learned(*noise), 8) == pytest.approx(1.0, abs=0.025)


def test_the_noise_is_measured() -> None:
    rng = np.random.default_rng(0)
    points = learned(*[(8, float(np.exp(rng.normal(0, 0.1)))) for _ in range(300)])
    assert np.sqrt(points.noise_var[0]) == pytest.approx(0.1, rel=0.3)


def test_a_full_row_drops_its_lightest_point() -> None:
    points = learned(*[(10 * i, 1.0 * i) for i in range(1, SLOTS + 1)], *[(80, 8.0)] * 3, (200, 20))
    assert 200 in points.share[0]
    assert 10 not in points.share[0]
    assert (points.weight[0] > 0).all()


def test_a_knee_that_noise_explains_is_not_seen() -> None:
    bumpy_line = [(5, 25.4), (18, 38.0), (32, 52.0), (43, 63.0)]
    assert learned(*bumpy_line).curves(0.0).floor_s[0] == 0


def test_steps_without_a_report_are_only_counted() -> None:
    points = learned((0, 0.0), (0, 0.0))
    assert not points.known[0]
    assert points.steps_since_learned[0] == 2


def test_a_joiner_inherits_the_points_of_its_kind_and_a_new_kind_has_none() -> None:
    points = learned((8, 1.0), (16, 1.5))
    wider = Fleet.of([Worker(id="a"), Worker(id="b", kind="odd"), Worker(id="w")], batch=100)
    moved = points.carried_over(wider, 0.03)
    assert moved.known.tolist() == [True, False, True]
    assert moved.seconds[0].tolist() == moved.seconds[2].tolist() == points.seconds[0].tolist()
    assert (moved.weight[0] <= moved.weight[2]).all()
    guess = moved.with_guesses(wider, 90).curves(0.1)
    assert guess.seconds(np.full(3, 30))[1] > 0


def test_a_single_point_is_not_inherited() -> None:
    wider = Fleet.of([Worker(id="a"), Worker(id="w")], batch=100)
    assert learned((8, 1.0)).carried_over(wider, 0.03).known.tolist() == [False, True]


def levels(kinds: str, *seconds: float, steps: int = 20) -> tuple[FloatArray, float]:
    """Shrunken levels of workers with these step times, and the standard error of the first."""
    workers = [Worker(id=f"w{i}", kind=kind) for i, kind in enumerate(kinds)]
    fleet, shares = Fleet.of(workers, batch=100), np.full(len(kinds), 8)
    points = CurvePoints.empty().carried_over(fleet, 0.03)
    for step in range(steps):
        outcome = Outcome(
            step=step,
            samples=shares,
            compute_s=np.array(seconds) * (1.05 if step % 2 else 0.95),
            forecast_samples_per_s=np.full(len(kinds), np.nan),
        )
        points = learn(points, points.with_guesses(fleet, 100).curves(0.1), outcome)
    curves = points.curves(0.1)
    factor = np.exp(shrink_to_kind(points, curves, fleet, shares))
    return curves.seconds(shares) * factor, float(np.sqrt(points.level_var[0]))


def test_workers_of_one_kind_are_equal_within_noise() -> None:
    (first, second), error = levels("aa", 1.0, 1.02)
    assert ALIKE_SIGMAS * error > 0.01  # each is 0.01 from their mean
    assert first == pytest.approx(second, rel=1e-6)


def test_workers_that_differ_significantly_are_not_shrunk() -> None:
    (first, second), _ = levels("aa", 1.0, 3.0)
    assert second / first == pytest.approx(3.0, rel=0.01)


def test_workers_of_different_kinds_are_independent() -> None:
    (first, second), _ = levels("ab", 1.0, 1.02)
    assert second / first == pytest.approx(1.02, rel=1e-6)


def test_more_measurements_separate_smaller_differences() -> None:
    (first, second), _ = levels("aa", 1.0, 1.05, steps=3)
    assert second / first == pytest.approx(1.0, rel=1e-6)
    (first, second), _ = levels("aa", 1.0, 1.05, steps=60)
    assert second / first > 1.02
