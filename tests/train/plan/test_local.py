"""The planner in a thread of the leader: which steps reach the decisions."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from evenstep.config import Settings
from evenstep.decide.batching import POLICIES
from evenstep.engine import Engine
from evenstep.errors import PlanError
from evenstep.journal import Journal, read
from evenstep.pace import WATCHED_STEPS
from evenstep.strict import build
from evenstep.train.plan.local import LocalPlanner
from evenstep.train.step import Batch, Report, Step
from evenstep.types import StepDone, Worker
from tests.decide.uncapped import Uncapped


def report(compute_s: float) -> Report:
    return Report(
        samples=32, compute_s=compute_s, wait_s=0.0, free_cpu=1.0, free_memory=1.0, weight=32.0
    )


def done(number: int, *reports: Report) -> Step:
    step = Step()
    step.batch, step.reports, step.seconds = Batch(step=number), list(reports), 0.02
    step.number = number + 1
    return step


class ManualClock:
    now_s = 0.0


def test_calm_steps_are_reported_as_means_without_gaps(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    settings = build(Settings, {"policy": "uniform", "batch": {"size": 64}, "workers": {"min": 2}})
    engine = Engine(settings)
    engine.journal = Journal.create(path, settings)
    clock = ManualClock()
    planner = LocalPlanner(engine, [Worker(id="a"), Worker(id="b")], lambda: clock.now_s)
    # Steps shorter than a decision's interval, and enough of them for decisions on a busy machine.
    noise = [0.02 + 0.00001 * (step % 7) for step in range(10_000)]
    for step, compute_s in enumerate(noise):
        clock.now_s = 0.02 * step
        planner.report(last := done(step, report(compute_s), report(0.02)))
    planner.close(last)
    events = [record.event for record in read(path)[1] if isinstance(record.event, StepDone)]
    assert sum(event.steps.num for event in events) == len(noise)
    # The first few are reported singly, unless the machine is too busy to decide on them.
    calm = [(a.step, b) for a, b in pairwise(events) if a.step >= WATCHED_STEPS]
    assert any(event.step > before + 1 for before, event in calm)
    for before, event in calm:
        mean_s = fmean(noise[before + 1 : event.step + 1])
        assert [r.compute_s for r in event.reports] == pytest.approx([mean_s, 0.02])


def test_a_policy_that_ignores_caps_is_an_error_and_the_last_plan_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(POLICIES, "uncapped", Uncapped)
    policy = {"name": "uncapped", "at_first": False}
    engine = Engine(build(Settings, {"policy": policy, "batch": {"size": 64}}))
    planner = LocalPlanner(engine, [Worker(id="a"), Worker(id="b", cap=8)], lambda: 0.0)
    first = planner.next(0)
    assert first is not None
    assert first.shares == (56, 8)
    planner.report(last := done(0, report(0.02), report(0.02)))
    planner.close(last)
    assert isinstance(planner.failure, PlanError)
    assert "policy uncapped gave worker b 32 samples, more than its cap of 8" in str(
        planner.failure
    )
    assert planner.next(1) is None
