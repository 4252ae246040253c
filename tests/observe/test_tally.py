"""The totals of a run: kept while it trains, beside what the simulator knows of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.config import BatchSettings, Choice, Settings
from evenstep.engine import Engine
from evenstep.journal import read
from evenstep.observe.overview import overview
from evenstep.observe.summary import summary
from evenstep.observe.tally import MAX_DECISIONS, Tally, Totals, kind_of
from evenstep.simulate.run import run
from evenstep.simulate.scenario import load_scenario
from evenstep.types import Joined, Left, Lost, StepDone, StepReport, Steps, Worker

SCENARIO = Path(__file__).parents[2] / "scenarios" / "four-uneven.yaml"


def followed(engine: Engine, tally: Tally, at_s: float, event: object) -> None:
    engine.is_watched = True
    engine.handle(at_s, event)  # type: ignore[arg-type]
    assert engine.newest is not None
    tally.add(engine.newest)


@pytest.mark.parametrize("policy", ["auto", "uniform"])
def test_a_simulated_run_is_measured_against_its_true_limit(policy: str, tmp_path: Path) -> None:
    scenario = load_scenario(SCENARIO)
    result = run(scenario, Choice(policy), journal=tmp_path / "run.jsonl")
    _, records = read(tmp_path / "run.jsonl")
    tally = Tally()
    for record in records:
        tally.add(record)
    totals = tally.totals
    assert totals.samples == result.samples
    assert totals.num_steps == result.num_steps
    assert totals.trained_s == pytest.approx(float(result.step_s.sum()))
    achieved = float(result.limit_s.sum() / result.step_s.sum())
    assert totals.part_of_limit == pytest.approx(achieved, abs=0.05)
    assert totals.wait_fraction == pytest.approx(result.wait_fraction, abs=0.05)
    assert totals.cost == pytest.approx(result.cost, rel=0.05)
    if policy == "uniform":
        assert totals.speedup == pytest.approx(1.0, abs=0.02)
    else:
        assert totals.speedup > 1.2


def engine_of(num_workers: int) -> tuple[Engine, Tally]:
    engine, tally = Engine(Settings(batch=BatchSettings(size=60), samples=6000)), Tally()
    workers = tuple(Worker(id=f"w{i}", price_per_hour=36.0) for i in range(num_workers))
    followed(engine, tally, 10.0, Joined(workers=workers))
    return engine, tally


def step(engine: Engine, number: int, *, idle_s: float = 0.0, quiet: int = 0) -> StepDone:
    reports = tuple(StepReport(w, n, 0.01 * n) for w, n in engine.cluster.shares.items())
    return StepDone(
        step=number,
        generation=engine.cluster.generation,
        seconds=0.5,
        reports=reports,
        quiet=Steps(num=quiet, seconds=0.5 * quiet, samples=60 * quiet),
        position=60 * (number + 1),
        idle_s=idle_s,
    )


def test_steps_changes_idle_time_and_cost_add_up() -> None:
    engine, tally = engine_of(3)
    followed(engine, tally, 12.0, step(engine, 3, quiet=3))
    followed(engine, tally, 13.0, Lost(workers=("w1",), cause="killed"))
    followed(engine, tally, 15.0, step(engine, 4, idle_s=1.5))
    followed(engine, tally, 16.0, Left(workers=("w2",), cause="asked for"))
    followed(engine, tally, 17.0, step(engine, 5, idle_s=0.25))
    totals = tally.totals
    assert (totals.num_steps, totals.samples, totals.trained_s) == (6, 360, 3.0)
    assert totals.elapsed_s == 7.0
    assert (totals.num_changes, totals.num_lost) == (2, 1)
    assert (totals.idle_s, totals.longest_idle_s) == (1.75, 1.5)
    assert totals.cost == pytest.approx(0.01 * (3 * 3 + 2 * 3 + 1 * 1))
    assert totals.samples_per_s == 120.0
    assert [kind_of(action) for _, action in tally.decisions][-2:] == ["regroup", "plan"]
    assert tally.position == 360


def test_memory_stays_bounded() -> None:
    engine, tally = engine_of(2)
    for number in range(50):
        followed(engine, tally, 11.0 + number, Lost(workers=("w1",)))
        followed(engine, tally, 11.5 + number, Joined(workers=(Worker(id="w1"),)))
    assert len(tally.decisions) == MAX_DECISIONS
    assert tally.totals.num_changes == 100


def test_the_overview_knows_how_long_it_takes() -> None:
    engine, tally = engine_of(3)
    followed(engine, tally, 12.0, step(engine, 24, quiet=3))
    seen = overview(tally, engine.cluster.settings, {"length": 600}, 120.0)
    assert seen["progress"] == {
        "samples": 1500,
        "total_samples": 6000,
        "epoch": 2,
        "num_epochs": 10,
        "seconds_left": 4500 / 120.0,
    }
    assert 0.0 < seen["part_of_limit"] <= 1.0
    assert seen["speedup"] > 0.0
    assert seen["decisions"][-1]["reason"]


def test_before_anything_happened_everything_is_zero() -> None:
    seen = overview(Tally(), None, {}, 0.0)
    assert seen["progress"]["seconds_left"] == seen["totals"]["trained_s"] == 0.0
    assert summary(Tally().totals) == []


def test_a_summary_has_the_figures_in_ten_lines() -> None:
    totals = Totals(
        elapsed_s=800.0,
        trained_s=600.0,
        num_steps=10_000,
        samples=3_000_000,
        part_of_limit=0.97,
        speedup=1.84,
        wait_fraction=0.04,
        equal_wait_fraction=0.31,
        num_changes=5,
        num_lost=1,
        idle_s=1.4,
        longest_idle_s=0.6,
        cost=1.25,
        is_priced=True,
    )
    assert summary(totals) == [
        "trained       10,000 steps, 3,000,000 samples in 13:20 min",
        "throughput    5,000 samples/s in steps",
        "of the limit  97%, by the step-time curves of the workers",
        "speed-up      1.84x over equal shares",
        "waiting       4% of the workers' time in steps; with equal shares 31%",
        "roster        5 changes, 1 worker lost; idle 1.40 s in all, 0.60 s at most",
        "cost          1.25",
    ]
