"""`curve`: a short profile, then the min-max optimum of the fitted curves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.decide.batching.curve import Curve, CurveState
from evenstep.decide.curves import FlatLinear
from evenstep.types import Fleet, FloatArray, IntArray, Outcome, Worker
from tests.decide.cluster_model import best_of_all_s, drive, line
from tests.hypothesis_examples import examples

PROFILE_STEPS = 6


def test_the_emulated_cluster_runs_at_its_optimum_after_the_profile() -> None:
    curves = line([5, 5, 5, 20], [0.25, 0.5, 1, 1])
    run = drive(Curve(), curves, batch=128, num_steps=30)
    assert best_of_all_s(curves, 128) == pytest.approx(0.023)
    assert run.seconds[PROFILE_STEPS:].max() == pytest.approx(0.023)


@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_noise_costs_a_few_per_cent_and_shares_settle(noise: float) -> None:
    curves = line([5, 5, 5, 20], [0.25, 0.5, 1, 1])
    run = drive(Curve(), curves, batch=128, num_steps=300, noise=noise)
    assert run.achieved[100:].min() >= 0.93
    moves = sum((a != b).any() for a, b in zip(run.shares[200:], run.shares[201:], strict=False))
    assert moves <= 5


@st.composite
def flat_linear_fleets(draw: st.DrawFn) -> tuple[FlatLinear, int]:
    n = draw(st.integers(2, 8))
    columns = [
        draw(st.lists(st.floats(low, high), min_size=n, max_size=n))
        for low, high in ((0, 20), (0.1, 2), (0, 60))
    ]
    return line(*columns), n * draw(st.integers(40, 200))


@examples(12)
@given(flat_linear_fleets())
def test_any_flat_then_linear_fleet_comes_near_its_optimum(fleet: tuple[FlatLinear, int]) -> None:
    curves, batch = fleet
    run = drive(Curve(min_gain=0.0), curves, batch=batch, num_steps=80)
    assert run.seconds[-1] <= 1.02 * best_of_all_s(curves, batch)


def test_the_profile_shows_every_worker_at_each_size_and_keeps_the_sum() -> None:
    run = drive(Curve(), line([1] * 5, [1] * 5), batch=500, num_steps=PROFILE_STEPS)
    for worker in np.array(run.shares).T:
        assert len(set(worker.tolist())) >= 3
        assert worker.max() / worker.min() > 2


def test_a_memory_bound_is_never_exceeded_not_even_to_profile() -> None:
    curves = line([1, 1, 1], [0.1, 1, 1])
    run = drive(Curve(), curves, batch=300, num_steps=30, caps=[110, 300, 300])
    assert max(int(shares[0]) for shares in run.shares) == 110
    assert run.shares[-1].tolist() == [110, 95, 95]


def test_a_worker_that_changes_is_followed_without_a_new_profile() -> None:
    curves = line([5, 5, 5], [0.5, 0.5, 1])
    run = drive(
        Curve(),
        curves,
        batch=150,
        num_steps=80,
        factor=lambda step: [2.0 if step >= 30 else 1.0, 1.0, 1.0],
    )
    assert run.achieved[PROFILE_STEPS:30].min() > 0.98
    assert run.achieved[35:].min() > 0.97


def play(
    policy: Curve, memory: CurveState | None, fleet: Fleet, slow: FloatArray, num_steps: int
) -> tuple[CurveState, list[IntArray]]:
    """Run workers that take `slow` ms per sample and 5 ms per step."""
    memory, (shares, _) = policy.first_shares(memory, fleet, 200)
    history = [shares]
    for step in range(num_steps):
        outcome = Outcome(
            step=step,
            samples=shares,
            compute_s=(5 + slow * shares) * 1e-3,
            forecast_samples_per_s=np.full(len(fleet), np.nan),
        )
        memory, move = policy.next(memory, fleet, 200, shares, outcome)
        shares = shares if move is None else move[0]
        history.append(shares)
    return memory, history


def test_a_joiner_inherits_the_curve_of_its_kind_and_a_new_kind_is_profiled() -> None:
    fast, slow = Worker(id="a", kind="fast"), Worker(id="b", kind="slow")
    fleet = Fleet.of([fast, slow], batch=200)
    memory, _ = play(Curve(), None, fleet, np.array([1.0, 3.0]), 20)

    alike = Fleet.of([fast, slow, Worker(id="c", kind="fast")], batch=200)
    _, history = play(Curve(), memory, alike, np.array([1.0, 3.0, 1.0]), 10)
    assert history[0].tolist() == history[-1].tolist() == [86, 28, 86]

    strange = Fleet.of([fast, slow, Worker(id="c", kind="odd")], batch=200)
    _, history = play(Curve(), memory, strange, np.array([1.0, 3.0, 1.0]), 10)
    assert len({int(shares[2]) for shares in history[:PROFILE_STEPS]}) >= 3
    assert history[-1].tolist() == [86, 28, 86]
