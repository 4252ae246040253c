"""`proportional`: the controller of dynamic batching, rule by rule; and `predictive` beside it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evenstep.decide.batching.predictive import Predictive
from evenstep.decide.batching.proportional import Proportional, ProportionalState
from evenstep.decide.split import in_proportion
from evenstep.types import Fleet, IntArray, Outcome, Worker
from tests.decide.cluster_model import drive, line
from tests.hypothesis_examples import examples

UNIFORM = Proportional(start="uniform")


def fleet_of(num_workers: int, batch: int, caps: dict[int, int] | None = None) -> Fleet:
    rows = [Worker(id=f"w{i}", cap=(caps or {}).get(i)) for i in range(num_workers)]
    return Fleet.of(rows, batch=batch)


def outcome(shares: IntArray, seconds: list[float], forecast: list[float] | None = None) -> Outcome:
    nothing = [np.nan] * len(seconds)
    return Outcome(
        step=0,
        samples=shares,
        compute_s=np.array(seconds),
        forecast_samples_per_s=np.array(forecast or nothing),
    )


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def step(
    policy: Proportional,
    memory: ProportionalState,
    fleet: Fleet,
    shares: IntArray,
    seconds: list[float],
) -> tuple[ProportionalState, IntArray, str]:
    batch = int(shares.sum())
    memory, move = policy.next(memory, fleet, batch, shares, outcome(shares, seconds))
    return (memory, shares, "") if move is None else (memory, *move)


def test_two_workers_follow_the_rule_of_the_paper_then_renormalise() -> None:
    fleet = fleet_of(2, 200)
    memory, (shares, _) = UNIFORM.first_shares(None, fleet, 200)
    _, shares, reason = step(UNIFORM, memory, fleet, shares, [1.0, 3.0])
    # Eqs. 4 and 5 want 100 - 100 * (1 - 2) = 200 and 100 - 33.3 * (3 - 2) = 66.7: 266.7 in total.
    assert shares.tolist() == [150, 50]
    assert reason == "w0 is 1.50x faster than the mean: 100 -> 150"


def test_from_equal_shares_the_sizes_settle_after_few_adjustments() -> None:
    run = drive(UNIFORM, line([1, 1, 1], [1.0, 1.25, 0.8]), batch=3072, num_steps=20)
    changes = [i for i in range(19) if (run.shares[i] != run.shares[i + 1]).any()]
    assert len(changes) <= 2
    assert run.achieved[-1] > 0.99


@examples(30)
@given(
    st.lists(st.floats(0.05, 3), min_size=2, max_size=10),
    st.integers(100, 400),
    st.sampled_from([UNIFORM, Proportional(), Predictive()]),
)
@example([1.0, 1.0, 3.0, 2.5, 2.5, 0.9375, 0.1, 0.06], 143, Predictive())  # a tie in rounding
def test_workers_with_proportional_times_finish_together(
    per_sample_ms: list[float], per_worker: int, policy: Proportional | Predictive
) -> None:
    batch = per_worker * len(per_sample_ms)
    run = drive(policy, line([0.0] * len(per_sample_ms), per_sample_ms), batch=batch, num_steps=12)
    speed = 1 / np.array(per_sample_ms)
    best = in_proportion(speed, batch, *(ints(1, batch)[:, None] + 0 * run.shares[0]))
    # Exact, except for a last sample on which two workers tie.
    remainders = np.sort(batch * speed / speed.sum() % 1.0)
    ties = bool((np.diff(remainders) < 1e-9).any())
    within = ties if isinstance(policy, Predictive) else 0.06 * best + 1
    assert (np.abs(run.shares[-1] - best) <= within).all()


def test_a_fixed_cost_still_leads_to_equal_finish_times() -> None:
    curves = line([5, 5, 5, 20], [0.25, 0.5, 1, 1])
    for policy in (UNIFORM, Predictive()):
        run = drive(policy, curves, batch=128, num_steps=40)
        assert run.seconds[-1] == pytest.approx(0.023)


def test_within_the_dead_band_nothing_changes_and_beyond_it_everything_does() -> None:
    fleet = fleet_of(4, 4000)
    memory, (shares, _) = UNIFORM.first_shares(None, fleet, 4000)
    _, kept, _ = step(UNIFORM, memory, fleet, shares, [1.0, 1.0, 1.0, 1.05])
    assert kept.tolist() == shares.tolist()
    _, moved, _ = step(UNIFORM, memory, fleet, shares, [1.0, 1.0, 1.02, 1.09])
    assert (moved != shares).all()


def test_a_share_that_rounds_to_itself_triggers_no_change() -> None:
    fleet = fleet_of(3, 2003)
    # w0 wants 3.3 samples, 10 % more, and cannot have them; the others want 2 % or less.
    shares = ints(3, 1000, 1000)
    memory, _ = UNIFORM.first_shares(None, fleet, 2003)
    _, kept, _ = step(UNIFORM, memory, fleet, shares, [0.9, 1.0, 1.02])
    assert kept.tolist() == shares.tolist()


def test_times_are_smoothed_since_the_last_change_and_no_longer() -> None:
    policy = Proportional(start="uniform", smoothing=0.5, dead_band=0.3)
    fleet = fleet_of(2, 200)
    memory, (shares, _) = policy.first_shares(None, fleet, 200)
    memory, shares, _ = step(policy, memory, fleet, shares, [1.0, 1.0])
    memory, shares, _ = step(policy, memory, fleet, shares, [1.0, 2.2])  # smoothed: 1.6
    assert shares.tolist() == [100, 100]
    memory, shares, _ = step(policy, memory, fleet, shares, [1.0, 2.2])  # smoothed: 1.9
    assert shares.tolist() == [131, 69]
    memory, shares, _ = step(policy, memory, fleet, shares, [1.0, 3.0])  # 3.0: 1.9 is forgotten
    assert (
        shares.tolist()
        == in_proportion(np.array([131 / 1.0, 69 / 3.0]), 200, fleet.lower, fleet.upper).tolist()
    )


def test_samples_cut_off_by_a_bound_go_to_the_others_in_proportion() -> None:
    fleet = fleet_of(3, 300, caps={0: 120})
    memory, (shares, _) = UNIFORM.first_shares(None, fleet, 300)
    _, shares, _ = step(UNIFORM, memory, fleet, shares, [0.2, 1.0, 2.0])
    assert shares.tolist() == [120, 120, 60]


def test_a_report_of_an_older_plan_does_not_move_the_shares_again() -> None:
    fleet = fleet_of(2, 200)
    memory, (first, _) = UNIFORM.first_shares(None, fleet, 200)
    memory, shares, _ = step(UNIFORM, memory, fleet, first, [1.0, 3.0])
    _, move = UNIFORM.next(memory, fleet, 200, shares, outcome(first, [1.0, 3.0]))
    assert move is None


def test_fewer_than_min_reports_change_nothing() -> None:
    policy = Proportional(start="uniform", min_reports=3)
    run = drive(policy, line([0, 0], [1, 2]), batch=90, num_steps=5)
    assert [s.tolist() for s in run.shares] == [[45, 45]] * 3 + [[60, 30]] * 2


def test_known_workers_keep_their_speeds_and_joiners_inherit_from_their_kind() -> None:
    before = fleet_of(2, 300)
    memory, (shares, _) = UNIFORM.first_shares(None, before, 300)
    memory, shares, _ = step(UNIFORM, memory, before, shares, [1.0, 2.0])
    rows = [Worker(id="w1"), Worker(id="w2"), Worker(id="w0")]
    _, (shares, reason) = UNIFORM.first_shares(memory, Fleet.of(rows, batch=300), 300)
    assert shares.tolist() == [133, 67, 100]
    assert "2 of 3" in reason


class TestCeiling:
    """w0 thrashes beyond 60 samples."""

    fleet = fleet_of(2, 100)

    def seconds(self, shares: IntArray, slower: float = 1.0, *, heals: bool = False) -> list[float]:
        thrash = 5.0 if shares[0] > 60 and not heals else 1.0
        return [shares[0] * 1e-3 * slower * thrash, shares[1] * 3e-3]

    def run(self, num_steps: int) -> tuple[ProportionalState, IntArray, list[str]]:
        memory, (shares, _) = UNIFORM.first_shares(None, self.fleet, 100)
        reasons = []
        for _ in range(num_steps):
            memory, shares, reason = step(UNIFORM, memory, self.fleet, shares, self.seconds(shares))
            reasons.append(reason)
        return memory, shares, reasons

    def test_a_raise_that_lowers_throughput_is_undone_permanently(self) -> None:
        memory, shares, reasons = self.run(60)
        assert any("slower per sample above its bound" in r for r in reasons)
        assert shares[0] <= 60
        assert np.isfinite(memory.ceilings.share[0])
        assert np.isinf(memory.ceilings.share[1])
        assert not any(reasons[-20:])

    def test_the_bound_is_dropped_when_the_machine_changes(self) -> None:
        memory, shares, _ = self.run(60)
        for _ in range(60):
            seconds = self.seconds(shares, 0.7, heals=True)
            memory, shares, _ = step(UNIFORM, memory, self.fleet, shares, seconds)
        assert np.isinf(memory.ceilings.share[0])
        assert shares[0] > 75

    def test_an_external_slowdown_leaves_no_bound(self) -> None:
        memory, (shares, _) = UNIFORM.first_shares(None, self.fleet, 100)
        for i in range(120):
            slower = 2.0 if 1 <= i < 60 else 1.0  # temporarily, just after the first raise
            seconds = self.seconds(shares, slower, heals=True)
            memory, shares, _ = step(UNIFORM, memory, self.fleet, shares, seconds)
        assert np.isinf(memory.ceilings.share).all()
        assert shares[0] == pytest.approx(75, abs=3)

    def test_noise_alone_sets_no_bound(self) -> None:
        rng = np.random.default_rng(3)
        fleet = fleet_of(20, 2000)
        memory, (shares, _) = UNIFORM.first_shares(None, fleet, 2000)
        for _ in range(1000):
            seconds = shares * 1e-3 * np.exp(rng.normal(0, 0.1, 20))
            memory, shares, _ = step(UNIFORM, memory, fleet, shares, seconds.tolist())
            assert np.isinf(memory.ceilings.share).all()

    def test_bounds_that_cannot_hold_the_batch_are_dropped(self) -> None:
        memory, _, _ = self.run(60)
        bound = int(memory.ceilings.share[0])
        alone = Fleet.of([Worker(id="w0")], batch=100)
        assert bound < 100
        memory, (shares, _) = UNIFORM.first_shares(memory, alone, 100)
        assert shares.tolist() == [100]
        assert np.isinf(memory.ceilings.share[0])


def test_predictive_uses_forecast_then_measured_then_known_speed() -> None:
    fleet = fleet_of(3, 600)
    policy, shares = Predictive(), ints(200, 200, 200)
    memory, _ = policy.first_shares(None, fleet, 600)
    measured = outcome(shares, [1.0, 1.0, 1.0], [100.0, np.nan, 300.0])
    memory, move = policy.next(memory, fleet, 600, shares, measured)
    assert move is not None
    assert move[0].tolist() == [100, 200, 300]
    memory, move = policy.next(memory, fleet, 600, shares, outcome(shares, [np.nan] * 3))
    assert move is not None
    assert move[0].tolist() == [100, 200, 300]


def test_predictive_reacts_in_the_step_that_was_forecast() -> None:
    run = drive(
        Predictive(),
        line([0, 0], [1, 1]),
        batch=90,
        num_steps=20,
        factor=lambda step: [1.0, 2.0 if step >= 10 else 1.0],
        announced=True,
    )
    assert run.shares[9].tolist() == [45, 45]
    assert run.shares[10].tolist() == [60, 30]


def test_predictive_keeps_shares_within_its_dead_band_of_samples() -> None:
    fleet, shares = fleet_of(2, 200), ints(100, 100)
    seen = outcome(shares, [1.0, 1.04])  # asks for 102 and 98
    policy = Predictive(dead_band_samples=2)
    memory, _ = policy.first_shares(None, fleet, 200)
    assert policy.next(memory, fleet, 200, shares, seen)[1] is None
    assert Predictive().next(memory, fleet, 200, shares, seen)[1] is not None
