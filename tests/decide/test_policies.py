"""What every batch policy guarantees, for any measurements and membership changes."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.decide.batching import POLICIES
from evenstep.decide.split import in_proportion, water_fill
from evenstep.errors import ConfigError
from evenstep.ports import BatchPolicy
from evenstep.strict import build
from evenstep.types import Fleet, IntArray, Outcome, StepDone, StepReport, Worker
from tests.decide.cluster_model import drive, line
from tests.hypothesis_examples import examples

NAMES = sorted(POLICIES)
OF_THE_PAPERS = ("static", "proportional", "predictive", "curve", "shift")


def make(name: str, fleet: Fleet, batch: int) -> BatchPolicy:
    """The policy with its defaults; `fixed` gets shares that fit."""
    if name == "fixed":
        shares = water_fill(batch, fleet.lower, fleet.upper)
        return build(POLICIES[name], {"shares": shares.tolist()})
    return build(POLICIES[name], {})


@dataclass(frozen=True)
class Story:
    """A sequence of fleets, each with a few steps of random measurements and forecasts."""

    batch: int
    fleets: list[Fleet]
    seed: int
    num_steps: int


@st.composite
def stories(draw: st.DrawFn) -> Story:
    batch = draw(st.integers(1, 300))
    fleets = []
    for _ in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.integers(0, 9), min_size=1, max_size=7, unique=True))
        fair = -(-batch // len(names))  # caps at or above it hold the batch
        rated = draw(st.booleans())
        workers = [
            Worker(
                id=f"w{i}",
                kind="ab"[i % 2],
                cores=draw(st.floats(0.1, 64)),
                flops=draw(st.floats(1e9, 1e15)) if rated else None,
                cap=draw(st.none() | st.integers(fair, max(fair, batch))),
                warmup_samples_per_s=draw(st.none() | st.floats(0.1, 1e5)),
            )
            for i in names
        ]
        min_share = draw(st.integers(0, batch // len(names)))
        fleets.append(Fleet.of(workers, batch=batch, min_share=min_share))
    return Story(batch, fleets, draw(st.integers(0, 2**32)), draw(st.integers(0, 12)))


def any_outcome(
    rng: np.random.Generator, step: int, fleet: Fleet, shares: IntArray, batch: int
) -> Outcome:
    """Extreme times, reports of other shares, invalid forecasts, and missing reports."""
    reports, forecasts = [], []
    for worker, share in zip(fleet.ids, shares.tolist(), strict=True):
        if rng.random() < 0.2:
            continue
        samples = share if rng.random() < 0.8 else int(rng.integers(0, batch + 1))
        seconds = 10.0 ** rng.uniform(-3, 1)
        if rng.random() < 0.05:
            seconds = 10.0 ** rng.uniform(-300, 300)
        reports.append(StepReport(worker, samples, seconds))
        wild = rng.choice([np.nan, 0.0, -1.0, np.inf, 1e-300, 1e300])
        forecasts.append(10.0 ** rng.uniform(-2, 6) if rng.random() < 0.5 else float(wild))
    event = StepDone(
        step=step, generation=1, seconds=1.0, reports=tuple(reports), forecasts=tuple(forecasts)
    )
    return Outcome.of(event, fleet)


def sealed(value: Any) -> Any:
    """The same value with read-only arrays."""
    if isinstance(value, np.ndarray):
        value.setflags(write=False)
    elif is_dataclass(value):
        for field in fields(value):
            sealed(getattr(value, field.name))
    elif isinstance(value, tuple):
        for part in value:
            sealed(part)
    return value


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if is_dataclass(one):
        for field in fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        np.testing.assert_array_equal(one, other)


def check(name: str, move: tuple[IntArray, str], fleet: Fleet, batch: int) -> None:
    shares, reason = move
    assert shares.dtype == np.int64
    assert shares.sum() == batch
    assert (fleet.lower <= shares).all()
    assert (shares <= fleet.upper).all()
    if name in OF_THE_PAPERS and batch >= np.maximum(fleet.lower, 1).sum():
        assert (shares > 0).all()
    assert 0 < len(reason) < 160


@pytest.mark.parametrize("name", NAMES)
@examples(30)
@given(stories())
def test_plans_keep_sum_and_bounds_and_are_deterministic(name: str, story: Story) -> None:
    batch, rng = story.batch, np.random.default_rng(story.seed)
    policy, memory = make(name, story.fleets[0], batch), None
    for fleet in story.fleets:
        sealed(fleet)
        first = policy.first_shares(memory, fleet, batch)
        assert_same(first, policy.first_shares(memory, fleet, batch))
        memory, move = sealed(first)
        check(name, move, fleet, batch)
        shares = move[0]
        for step in range(story.num_steps):
            if rng.random() < 0.1:  # other shares than planned: the policy must continue from them
                weight = rng.uniform(0.01, 1, len(fleet))
                shares = in_proportion(weight, batch, fleet.lower, fleet.upper)
            outcome = any_outcome(rng, step, fleet, shares, batch)
            sealed((shares, outcome))
            decided = policy.next(memory, fleet, batch, shares, outcome)
            assert_same(decided, policy.next(memory, fleet, batch, shares, outcome))
            memory, next_move = sealed(decided)
            if next_move is not None:
                check(name, next_move, fleet, batch)
                shares = next_move[0]


@pytest.mark.parametrize("name", [n for n in NAMES if n != "fixed"])
@pytest.mark.parametrize(("num_workers", "batch"), [(1, 64), (2, 65), (5, 160), (7, 1000)])
def test_equal_workers_have_equal_shares(name: str, num_workers: int, batch: int) -> None:
    curves = line([5.0] * num_workers, [1.0] * num_workers)
    run = drive(build(POLICIES[name], {}), curves, batch=batch, num_steps=60)
    settled = run.shares[10:] if name == "curve" else run.shares  # it profiles first
    assert max(int(np.ptp(shares)) for shares in settled) <= 1


@pytest.mark.parametrize("name", OF_THE_PAPERS)
def test_a_worker_without_a_share_gets_a_sample_to_be_measured(name: str) -> None:
    curves = line([1.0] * 4, [1.0] * 4)
    run = drive(build(POLICIES[name], {}), curves, batch=64, num_steps=3, start=[32, 32, 0, 0])
    assert (run.shares[1] > 0).all()


@pytest.mark.parametrize("name", ["proportional", "predictive", "curve", "shift"])
def test_a_worker_without_a_report_does_not_hold_up_the_others(name: str) -> None:
    fleet = Fleet.of([Worker(id=f"w{i}") for i in range(3)], batch=90)
    policy = make(name, fleet, 90)
    memory, (shares, _) = policy.first_shares(None, fleet, 90)
    per_sample_s = np.array([1e-3, 1e-3, 4e-3])
    for step in range(100):
        compute_s = np.where([True, False, True], shares * per_sample_s, np.nan)
        outcome = Outcome(
            step=step,
            samples=np.where(np.isnan(compute_s), 0, shares),
            compute_s=compute_s,
            forecast_samples_per_s=np.full(3, np.nan),
        )
        memory, move = policy.next(memory, fleet, 90, shares, outcome)
        shares = shares if move is None else move[0]
    assert shares[0] > 2 * shares[2]
    assert shares[1] > 0


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("fixed", {}, "shares"),
        ("fixed", {"shares": "2,x"}, "shares"),
        ("fixed", {"shares": [2, -1]}, "shares"),
        ("fixed", {"shares": []}, "shares"),
        ("proportional", {"start": "random"}, "start"),
        ("proportional", {"smoothing": 0.0}, "smoothing"),
        ("proportional", {"dead_band": -0.1}, "dead_band"),
        ("proportional", {"min_reports": 0}, "min_reports"),
        ("proportional", {"drop": 1.0}, "drop"),
        ("predictive", {"dead_band_samples": -1}, "dead_band_samples"),
        ("curve", {"sizes": [1.0]}, "sizes"),
        ("curve", {"steps_per_size": 0}, "steps_per_size"),
        ("curve", {"every": 0}, "every"),
        ("curve", {"min_gain": 1.0}, "min_gain"),
        ("curve", {"misfit": 0.0}, "misfit"),
        ("shift", {"start": "random"}, "start"),
        ("shift", {"window": 0}, "window"),
        ("shift", {"max_window": 4}, "max_window"),
        ("shift", {"move": 0.0}, "move"),
        ("shift", {"pairs": 0}, "pairs"),
        ("shift", {"tolerance": 1.0}, "tolerance"),
        ("shift", {"resume": 0.0}, "resume"),
        ("uniform", {"shares": 3}, "shares"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(name: str, options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build(POLICIES[name], options)
    assert refused.value.field == field
