"""`auto` reaches the limit within a few steps from any start, and probes idle workers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.decide.batching.auto import Auto
from evenstep.decide.split import split
from evenstep.errors import ConfigError
from evenstep.types import Fleet, FloatArray, IntArray, Outcome, Worker
from tests.decide.cluster_model import drive, line
from tests.hypothesis_examples import examples

AUTO = Auto(start="uniform")


@pytest.mark.parametrize(
    ("fixed_ms", "per_sample_ms", "floor_ms", "batch", "caps"),
    [
        ([5, 5, 5, 20], [0.25, 0.5, 1, 1], None, 128, None),
        ([10, 10, 10], [8.5, 1, 0.85], None, 192, None),
        ([60, 200, 350], [5, 12, 20], None, 24, None),  # only the first is worth a sample
        ([2, 2, 4, 4], [0.1, 0.1, 0.5, 0.5], [20, 20, 25, 30], 512, None),  # all have a knee
        ([15, 15], [1, 2.2], None, 96, [64, 40]),
        ([15, 15], [1, 2.2], None, 96, [50, 46]),  # the caps leave a single split
        ([0] * 8, [1] * 8, None, 100, None),
    ],
)
def test_the_limit_is_reached_within_ten_steps_of_equal_shares(
    fixed_ms: list[float],
    per_sample_ms: list[float],
    floor_ms: list[float] | None,
    batch: int,
    caps: list[int] | None,
) -> None:
    curves = line(fixed_ms, per_sample_ms, floor_ms)
    run = drive(AUTO, curves, batch=batch, num_steps=18, caps=caps)
    assert run.achieved[10:].min() >= 0.98


@st.composite
def affine_fleets(draw: st.DrawFn) -> tuple[list[float], list[float], int]:
    n = draw(st.integers(2, 10))
    fixed = draw(st.lists(st.floats(1, 30), min_size=n, max_size=n))
    slope = draw(st.lists(st.floats(0.05, 3), min_size=n, max_size=n))
    return fixed, slope, n * draw(st.integers(64, 300))  # a sample is a small part of a step


@examples(40)
@given(affine_fleets())
def test_any_affine_fleet_comes_within_three_per_cent_of_the_limit(
    fleet: tuple[list[float], list[float], int],
) -> None:
    fixed, slope, batch = fleet
    run = drive(AUTO, line(fixed, slope), batch=batch, num_steps=18)
    # The first probe of an idle worker comes after twenty steps.
    assert run.achieved[12:].min() >= 0.97


@examples(25)
@given(st.lists(st.integers(0, 60), min_size=4, max_size=4).filter(lambda s: sum(s) >= 60))
def test_any_starting_shares_lead_to_the_same_place(start: list[int]) -> None:
    batch = sum(start)
    run = drive(
        AUTO, line([5, 5, 5, 20], [0.25, 0.5, 1, 1]), batch=batch, num_steps=40, start=start
    )
    # A sample is up to a twentieth of a step: allow one sample off.
    assert np.median(run.achieved[25:]) >= 0.95


@pytest.mark.parametrize("slope", [[1.0, 0.25, 0.1], [1.0, 1.0, 0.1], [0.4] * 4 + [0.1] * 4])
def test_with_noisy_steps_shares_beat_the_noise_free_optimum(
    slope: list[float],
) -> None:
    num, batch, noise = len(slope), 3072, 0.06
    curves = line([2.0] * num, slope)
    run = drive(AUTO, curves, batch=batch, num_steps=300, noise=noise)
    luck = np.exp(np.random.default_rng(1).normal(0, noise, (4000, num)))

    def mean_s(shares: IntArray) -> float:
        return float((curves.seconds(shares) * luck).max(axis=1).mean())

    without = split(curves, batch, np.zeros(num, dtype=np.int64), np.full(num, batch))
    assert np.mean([mean_s(shares) for shares in run.shares[100:]]) < 0.995 * mean_s(without)


def test_equal_workers_with_noise_are_left_alone() -> None:
    run = drive(AUTO, line([5] * 8, [0.5] * 8), batch=256, num_steps=300, noise=0.03)
    assert run.achieved.mean() >= 0.985
    plans = sum((a != b).any() for a, b in zip(run.shares, run.shares[1:], strict=False))
    assert plans <= 15


@pytest.mark.long
@pytest.mark.parametrize(("num", "batch", "per_sample_ms"), [(2, 32, 3.0), (3, 3072, 0.1)])
def test_equal_workers_with_short_disturbances_are_left_alone(
    num: int, batch: int, per_sample_ms: float
) -> None:
    curves = line([2.0] * num, [per_sample_ms] * num)
    achieved = []
    for seed in range(8):
        delays = disturbances(seed, 300, num)
        run = drive(AUTO, curves, batch=batch, num_steps=300, noise=0.03, delays=delays, delay=2)
        achieved.append(run.achieved[40:].mean())
    assert np.mean(achieved) >= 0.97


def disturbances(seed: int, num_steps: int, num: int) -> FloatArray:
    """Slowdowns of up to 1.5 for up to five steps each, a quarter of the time."""
    rng = np.random.default_rng(seed)
    factors = np.ones((num_steps, num))
    for step, i in zip(*np.nonzero(rng.random((num_steps, num)) < 0.08), strict=True):
        factors[step : step + rng.integers(1, 6), i] = rng.uniform(1.1, 1.5)
    return factors


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("per_sample_ms", [[0.4, 0.4, 0.4], [1.2, 0.6, 0.3]])
def test_the_warmup_cost_of_larger_shares_does_not_mislead_the_policy(
    per_sample_ms: list[float], delay: int
) -> None:
    curves = line([5] * 3, per_sample_ms)
    run = drive(
        AUTO,
        curves,
        batch=3072,
        num_steps=40,
        noise=0.05,
        announced=True,  # the forecaster predicts no change
        new_size=4.0,
        delay=delay,
    )
    assert sum(run.achieved < 0.8) <= 6
    assert run.achieved[8:].min() >= 0.9


def test_a_change_that_comes_unannounced_costs_one_step() -> None:
    def slower(step: int) -> list[float]:
        return [2.0 if step >= 50 else 1.0, 1.0, 1.0, 1.0]

    curves = line([5] * 4, [0.5] * 4)
    run = drive(AUTO, curves, batch=128, num_steps=70, noise=0.01, factor=slower)
    assert run.achieved[50] < 0.8
    assert run.achieved[52:].mean() >= 0.98


def test_a_change_that_is_announced_costs_none() -> None:
    def slower(step: int) -> list[float]:
        return [2.0 if step >= 50 else 1.0, 1.0, 1.0, 1.0]

    curves = line([5, 5, 5, 20], [0.25, 0.5, 1, 1])
    run = drive(AUTO, curves, batch=128, num_steps=70, noise=0.01, factor=slower, announced=True)
    assert run.achieved[48:].min() >= 0.93
    surprised = drive(AUTO, curves, batch=128, num_steps=70, noise=0.01, factor=slower)
    assert surprised.achieved[48:].min() <= 0.7


def test_a_single_pause_is_undone_two_steps_later() -> None:
    def slower(step: int) -> list[float]:
        return [10.0 if step == 50 else 1.0, 1.0, 1.0, 1.0]

    curves = line([5] * 4, [0.25, 0.5, 0.5, 1])
    run = drive(AUTO, curves, batch=128, num_steps=70, noise=0.01, factor=slower)
    assert run.achieved[53:].mean() >= 0.98


def test_a_change_of_a_worker_that_often_pauses_is_believed_one_step_later() -> None:
    pauses = (50, 60, 70, 80, 90)

    def slower(step: int) -> list[float]:
        return [(10.0 if step in pauses else 1.0) * (2.0 if step >= 120 else 1.0), 1.0, 1.0, 1.0]

    curves = line([5] * 4, [0.25, 0.5, 0.5, 1])
    run = drive(AUTO, curves, batch=128, num_steps=130, noise=0.01, factor=slower)
    moved = [(run.shares[step + 1] != run.shares[step]).any() for step in pauses]
    assert moved == [True, True, False, False, False]
    assert (run.shares[121] == run.shares[120]).all()
    assert run.achieved[122:].min() >= 0.95


def test_an_idle_worker_that_recovers_is_found_again() -> None:
    def slower(step: int) -> list[float]:
        return [1.0, 1.0, 6.0 if step < 30 else 1.0]

    run = drive(AUTO, line([5] * 3, [0.5] * 3), batch=96, num_steps=500, factor=slower)
    assert run.shares[29][2] == 0
    assert abs(run.shares[-1][2] - 32) <= 2


@pytest.mark.long
def test_probing_idle_workers_costs_little() -> None:
    run = drive(AUTO, line([5, 5, 500], [0.5] * 3), batch=96, num_steps=2000)
    assert run.achieved[10:].mean() >= 0.99


@pytest.mark.long
def test_probing_many_idle_workers_costs_no_more_than_probing_one() -> None:
    curves = line([5.0] * 2 + [500.0] * 30, [0.5] * 32)
    run = drive(AUTO, curves, batch=96, num_steps=2000)
    assert run.achieved[10:].mean() >= 0.985


def test_a_joiner_of_a_known_kind_starts_with_the_share_of_its_kind() -> None:
    old = [Worker(id="a", kind="big"), Worker(id="b", kind="small")]
    fleet = Fleet.of(old, batch=90)
    memory, (shares, _) = AUTO.first_shares(None, fleet, 90)
    for step in range(10):
        took_s = shares / np.array([2000.0, 1000.0])
        nothing = np.full(2, np.nan)
        outcome = Outcome(
            step=step, samples=shares, compute_s=took_s, forecast_samples_per_s=nothing
        )
        memory, move = AUTO.next(memory, fleet, 90, shares, outcome)
        shares = move[0] if move else shares
    wider = Fleet.of([*old, Worker(id="c", kind="big")], batch=90)
    _, (shares, _) = AUTO.first_shares(memory, wider, 90)
    assert np.abs(shares - [36, 18, 36]).max() <= 1


@pytest.mark.parametrize(
    "wrong", [{"start": "fast"}, {"noise": 0.0}, {"worth": -0.1}, {"probe_cost": float("nan")}]
)
def test_invalid_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Auto(**wrong)  # type: ignore[arg-type]
