"""`curve`: a short profile, then the min-max optimum of the fitted curves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.decide.batching.curve import Curve, Memory
from evenstep.decide.batching.profile import PATIENCE, SLOTS, Profile
from evenstep.decide.curves import FlatLinear
from evenstep.decide.split import split
from evenstep.types import Fleet, FloatArray, IntArray, Outcome, Worker
from tests.decide.cluster_model import drive, line

PROFILE_STEPS = 6


def best_s(curves: FlatLinear, batch: int) -> float:
    """The least step time in which everyone has a sample."""
    n = len(curves.fixed_s)
    shares = split(curves, batch, np.ones(n, dtype=np.int64), np.full(n, batch))
    return float(curves.seconds(shares).max())


def test_the_emulated_cluster_runs_at_its_optimum_after_the_profile() -> None:
    curves = line([5, 5, 5, 20], [0.25, 0.5, 1, 1])
    run = drive(Curve(), curves, batch=128, num_steps=30)
    assert best_s(curves, 128) == pytest.approx(0.023)
    assert run.seconds[PROFILE_STEPS:].max() == pytest.approx(0.023)


@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_noise_costs_a_few_per_cent_and_shares_come_to_rest(noise: float) -> None:
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


@settings(max_examples=60, deadline=None)
@given(flat_linear_fleets())
def test_any_flat_then_linear_fleet_comes_near_its_optimum(fleet: tuple[FlatLinear, int]) -> None:
    curves, batch = fleet
    run = drive(Curve(min_gain=0.0), curves, batch=batch, num_steps=80)
    assert run.seconds[-1] <= 1.02 * best_s(curves, batch)


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
    assert run.achieved[30 + PATIENCE + 10 :].min() > 0.97


def play(
    policy: Curve, memory: Memory | None, fleet: Fleet, slow: FloatArray, num_steps: int
) -> tuple[Memory, list[IntArray]]:
    """Workers at `slow` milliseconds a sample and five a step."""
    memory, (shares, _) = policy.seat(memory, fleet, 200)
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


def test_a_joiner_takes_the_curve_of_its_kind_and_a_stranger_is_profiled() -> None:
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


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


class TestProfile:
    """The points of one worker."""

    fleet = Fleet.of([Worker(id="w")], batch=100)

    def learn(self, *times: tuple[int, float]) -> Profile:
        profile = Profile.none(1)
        for share, seconds in times:
            profile = profile.with_step(ints(share), np.array([seconds]), 0.2)
        return profile

    def at(self, profile: Profile, share: int) -> float:
        return float(profile.seconds[0][profile.share[0] == share][0])

    def test_times_at_a_share_are_averaged(self) -> None:
        assert self.at(self.learn((8, 1.0), (8, 1.1), (8, 0.9)), 8) == pytest.approx(1.0)

    def test_a_hiccup_is_left_out(self) -> None:
        steady = [(8, 1.0)] * 4
        assert self.at(self.learn(*steady, (8, 3.0), *steady), 8) == pytest.approx(1.0)

    def test_a_first_time_that_was_a_hiccup_is_replaced(self) -> None:
        assert self.at(self.learn((8, 3.0), (8, 1.0), (8, 1.0)), 8) == pytest.approx(1.0)

    def test_misfits_in_a_row_rescale_every_point(self) -> None:
        profile = self.learn((4, 1.0), *[(8, 2.0)] * 4, *[(8, 3.0)] * PATIENCE)
        assert self.at(profile, 8) == pytest.approx(3.0)
        assert self.at(profile, 4) == pytest.approx(1.5)

    def test_misfits_to_both_sides_are_noise(self) -> None:
        wild = [(8, 2.0 * (0.6 if i % PATIENCE == 0 else 1.5)) for i in range(4 * PATIENCE)]
        profile = self.learn((4, 1.0), *[(8, 2.0)] * 4, *wild)
        assert self.at(profile, 4) == pytest.approx(1.0)

    def test_a_full_row_gives_up_the_nearest_share(self) -> None:
        profile = self.learn(*[(10 * i, 1.0 * i) for i in range(1, SLOTS + 1)], (31, 3.1))
        assert 31 in profile.share[0]
        assert 30 not in profile.share[0]
        assert len(set(profile.share[0].tolist())) == SLOTS

    def test_a_knee_that_noise_explains_is_not_seen(self) -> None:
        line_with_a_bump = [(5, 25.4), (18, 38.0), (32, 52.0), (43, 63.0)]
        curve = self.learn(*line_with_a_bump).curves(self.fleet)
        assert curve.floor_s[0] == 0

    def test_silence_teaches_nothing(self) -> None:
        profile = Profile.none(1).with_step(ints(0), np.array([np.nan]), 0.2)
        assert not profile.known[0]
