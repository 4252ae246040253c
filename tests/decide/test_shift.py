"""`shift`: samples go from the straggler to the leader until one more would not help."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.decide.batching.shift import Shift
from evenstep.types import Fleet, Outcome, Worker
from tests.decide.cluster_model import Run, best_of_all_s, drive, line
from tests.hypothesis_examples import examples


def moves(run: Run) -> list[tuple[int, list[int]]]:
    """Steps after which shares changed, and by how much each."""
    pairs = zip(run.shares, run.shares[1:], strict=False)
    return [(i, (b - a).tolist()) for i, (a, b) in enumerate(pairs) if (a != b).any()]


def test_the_first_move_comes_after_a_window_from_the_slowest_to_the_fastest() -> None:
    run = drive(Shift(), line([0] * 4, [2, 1, 4, 3.5]), batch=128, num_steps=12)
    assert moves(run) == [(4, [0, 8, -8, 0]), (9, [0, 8, 0, -8])]


def test_the_fastest_worker_is_skipped_if_it_is_at_its_cap() -> None:
    curves = line([0] * 3, [1, 2, 4])
    run = drive(Shift(), curves, batch=96, num_steps=8, caps=[32, 96, 96])
    assert moves(run) == [(4, [0, 8, -8])]


def test_an_overshoot_halves_the_move_and_doubles_the_window() -> None:
    run = drive(Shift(move=1.0), line([0, 0], [1, 1.5]), batch=64, num_steps=25)
    # w1 gives all of its 32 samples; w0 is then the slowest and gives back half as many.
    assert moves(run)[:2] == [(4, [31, -31]), (9, [-16, 16])]
    assert moves(run)[2][0] == 19


def test_a_sample_that_made_it_worse_goes_back_and_the_fleet_settles() -> None:
    run = drive(Shift(move=0.01), line([0, 0], [1, 3]), batch=41, num_steps=99, start=[31, 10])
    assert moves(run) == [(4, [-1, 1]), (9, [1, -1])]


def test_a_window_without_measurements_moves_nothing() -> None:
    policy, fleet = Shift(window=1), Fleet.of([Worker(id="a"), Worker(id="b")], batch=8)
    memory, (shares, _) = policy.first_shares(None, fleet, 8)
    silence = np.full(2, np.nan)
    outcome = Outcome(
        step=0, samples=np.array([0, 0]), compute_s=silence, forecast_samples_per_s=silence
    )
    assert policy.next(memory, fleet, 8, shares, outcome)[1] is None


@st.composite
def fleets_of_four(draw: st.DrawFn) -> tuple[list[float], list[float], int]:
    fixed = draw(st.lists(st.floats(0, 10), min_size=4, max_size=4))
    slope = draw(st.lists(st.floats(0.2, 2), min_size=4, max_size=4))
    return fixed, slope, draw(st.integers(100, 500))


@examples(3)
@given(fleets_of_four())
def test_a_fleet_of_four_is_balanced_to_a_few_samples_and_then_left_alone(
    fleet: tuple[list[float], list[float], int],
) -> None:
    fixed, slope, batch = fleet
    run = drive(Shift(), line(fixed, slope), batch=batch, num_steps=900)
    sample_s = max(slope) * 1e-3
    best_s = best_of_all_s(line(fixed, slope), batch)
    assert run.seconds[-1] <= 1.01 * best_s + 2 * sample_s
    assert all(step < 700 for step, _ in moves(run))


@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_the_emulated_cluster_settles_near_its_optimum(pairs: int, noise: float) -> None:
    curves = line([5, 5, 5, 20], [0.25, 0.5, 1, 1])
    run = drive(Shift(pairs=pairs), curves, batch=128, num_steps=600, noise=noise)
    assert run.seconds[-1] <= 0.0245
    assert all(step < 400 for step, _ in moves(run))


def test_a_worker_that_changes_restarts_a_settled_fleet() -> None:
    run = drive(
        Shift(),
        line([0] * 4, [1] * 4),
        batch=400,
        num_steps=800,
        factor=lambda step: [3.0 if step >= 200 else 1.0, 1.0, 1.0, 1.0],
    )
    assert moves(run)[0][0] >= 200
    assert run.achieved[-1] > 0.95


def test_a_large_fleet_is_balanced_sooner_in_pairs() -> None:
    rng = np.random.default_rng(5)
    curves = line([1.0] * 40, rng.uniform(0.5, 2, 40).tolist())
    one, many = (drive(Shift(pairs=pairs), curves, batch=4000, num_steps=150) for pairs in (1, 20))
    assert many.achieved[-1] > one.achieved[-1] + 0.1
    assert many.achieved[-1] > 0.85


def test_a_worker_without_reports_neither_gives_nor_takes() -> None:
    fleet = Fleet.of([Worker(id=name) for name in "abc"], batch=96)
    policy = Shift()
    memory: Any
    memory, (shares, _) = policy.first_shares(None, fleet, 96)
    silent = Outcome(
        step=0,
        samples=np.where([True, False, True], shares, 0),
        compute_s=np.array([1.0, np.nan, 2.0]),
        forecast_samples_per_s=np.full(3, np.nan),
    )
    move = None
    while move is None:
        memory, move = policy.next(memory, fleet, 96, shares, silent)
    assert (move[0] - shares).tolist() == [8, 0, -8]
    assert move[1] == "c takes 2.00x as long as a: 32 -> 24, 32 -> 40"


def test_workers_that_stay_keep_their_proportions() -> None:
    policy = Shift()
    first = Fleet.of([Worker(id=name) for name in "abc"], batch=120)
    memory, _ = policy.first_shares(None, first, 120)
    shares = np.array([60, 20, 40], dtype=np.int64)
    seen = Outcome(
        step=0, samples=shares, compute_s=np.ones(3), forecast_samples_per_s=np.full(3, np.nan)
    )
    memory, _ = policy.next(memory, first, 120, shares, seen)
    _, (kept, reason) = policy.first_shares(
        memory, Fleet.of([Worker(id="a"), Worker(id="b")], batch=120), 120
    )
    assert kept.tolist() == [90, 30]
    assert "2 of 2" in reason
