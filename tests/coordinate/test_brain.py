"""The brain of a run: what it is not asked about is not lost on it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import NoReturn

import pytest

from evenstep.coordinate.brain import Brain
from evenstep.coordinate.joining import make_settings
from evenstep.decide.batching import POLICIES
from evenstep.journal import Journal, read
from evenstep.messages import from_client
from evenstep.types import Joined, Left, StepDone, StepReport, Worker
from tests.coordinate.fake import ready
from tests.decide.uncapped import Uncapped


@pytest.fixture
def brain(tmp_path: Path) -> Iterator[Brain]:
    """One whose every decision takes 20 ms, so that it is not asked about most steps."""
    ticks = count()
    made = Brain(
        lambda settings, about: Journal.create(tmp_path / "journal.jsonl", settings, about),
        lambda: 0.01 * next(ticks),
    )
    made.begin(make_settings(ready(), ("policy=uniform",)), {})
    made.decide(0.0, Joined(workers=(Worker(id="a"), Worker(id="b"))))
    yield made
    made.close()


def step(brain: Brain, number: int, compute_s: float = 0.1) -> None:
    reports = (StepReport("a", 32, compute_s), StepReport("b", 32, 0.1))
    done = StepDone(step=number, generation=1, seconds=0.1, reports=reports)
    brain.decide(0.1 * number, done)


def told(tmp_path: Path) -> list[StepDone]:
    records = read(tmp_path / "journal.jsonl")[1]
    return [record.event for record in records if isinstance(record.event, StepDone)]


def test_steps_that_were_not_decided_on_are_told_with_the_next(
    brain: Brain, tmp_path: Path
) -> None:
    for number in range(300):
        step(brain, number)
    events = told(tmp_path)
    assert 1 < len(events) < 150
    assert sum(event.steps.num for event in events) == events[-1].step + 1
    assert sum(event.steps.seconds for event in events) == pytest.approx(
        0.1 * (events[-1].step + 1)
    )
    assert brain.cluster.samples == 64 * (events[-1].step + 1)


@pytest.mark.parametrize("num_steps", range(95, 105))
def test_the_last_steps_are_recorded_as_training_ends(
    brain: Brain, tmp_path: Path, num_steps: int
) -> None:
    for number in range(num_steps):
        step(brain, number)
    brain.decide(10.0, Left(workers=("a", "b"), cause="trained to the end"))
    assert sum(event.steps.num for event in told(tmp_path)) == num_steps
    assert brain.tally.totals.samples == 64 * num_steps
    events = [record.event for record in read(tmp_path / "journal.jsonl")[1]]
    assert isinstance(events[-1], Left)


def test_a_policy_that_fails_on_the_last_steps_does_not_keep_the_workers_from_leaving(
    brain: Brain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(100):
        step(brain, number)

    def fail(*_: object) -> NoReturn:
        raise ValueError("a mistake of a policy")

    monkeypatch.setattr(type(brain.cluster.policy), "next", fail)
    brain.decide(10.0, Left(workers=("a", "b"), cause="trained to the end"))
    assert "the balancer has stopped" in caplog.text
    events = [record.event for record in read(tmp_path / "journal.jsonl")[1]]
    assert isinstance(events[-1], Left)


def test_steps_of_another_roster_count_as_samples_only(brain: Brain, tmp_path: Path) -> None:
    for number in range(100):
        step(brain, number)
    before = len(told(tmp_path))
    brain.decide(10.0, Left(workers=("b",)))
    for number in range(100, 200):
        done = StepDone(step=number, generation=2, seconds=0.1, reports=(StepReport("a", 64, 0.1),))
        brain.decide(0.1 * number, done)
    first, last = told(tmp_path)[before], told(tmp_path)[-1]
    assert first.quiet.num <= first.step - 100
    assert brain.cluster.samples == 64 * (last.step + 1)
    # For people they count in full.
    assert 0 < first.earlier.num < 100
    assert first.earlier.samples == 64 * first.earlier.num
    totals = brain.tally.totals
    assert (totals.num_steps, totals.samples) == (last.step + 1, 64 * (last.step + 1))
    assert totals.trained_s == pytest.approx(0.1 * (last.step + 1))


def test_totals_are_right_while_the_roster_changes_all_the_time(brain: Brain) -> None:
    for number in range(400):
        generation = 1 + number // 20
        if number and number % 20 == 0:
            event = (
                Left(workers=("b",)) if generation % 2 == 0 else Joined(workers=(Worker(id="b"),))
            )
            brain.decide(0.1 * number, event)
        workers = ("a",) if generation % 2 == 0 else ("a", "b")
        reports = tuple(StepReport(worker, 64 // len(workers), 0.1) for worker in workers)
        done = StepDone(step=number, generation=generation, seconds=0.1, reports=reports)
        brain.decide(0.1 * number, done)
    brain.decide(40.0, Left(workers=("a",)))
    totals = brain.tally.totals
    assert (totals.num_steps, totals.samples) == (400, 64 * 400)
    assert totals.samples_per_s == pytest.approx(640.0)


def test_a_calm_step_is_decided_on_by_the_means_of_those_since_the_last(
    brain: Brain, tmp_path: Path
) -> None:
    noise = [0.1 + 0.0001 * (number % 7) for number in range(300)]
    for number, seconds in enumerate(noise):
        step(brain, number, compute_s=seconds)
    events = told(tmp_path)
    assert max(event.quiet.num for event in events) > 5
    for event in events:
        mean_s = fmean(noise[event.step - event.quiet.num : event.step + 1])
        assert [r.compute_s for r in event.reports] == pytest.approx([mean_s, 0.1])


def test_a_policy_that_ignores_caps_is_named_once_and_the_shares_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(POLICIES, "uncapped", Uncapped)
    sets = ("policy={name: uncapped, at_first: false}",)
    brain = Brain(lambda *_: None, lambda: 0.0)
    brain.begin(make_settings(ready(), sets), {})
    brain.decide(0.0, Joined(workers=(Worker(id="a"), Worker(id="b", cap=8))))
    for number in range(3):
        step(brain, number)
    assert brain.cluster.shares == {"a": 56, "b": 8}
    (told,) = [r for r in caplog.records if "the balancer has stopped" in r.message]
    assert "policy uncapped gave worker b 32 samples, more than its cap of 8" in told.message
    assert told.exc_info is None


def test_a_worker_tells_an_older_coordinator_nothing_that_it_does_not_know() -> None:
    assert b"disabled_scalers" not in from_client.encode(ready())
    assert b"disabled_scalers" in from_client.encode(ready(disabled_scalers="GradScaler-1"))
    assert from_client.decode(from_client.encode(ready())) == ready()


def test_idle_time_of_steps_without_a_decision_is_not_lost(brain: Brain) -> None:
    for number in range(100):
        reports = (StepReport("a", 32, 0.1), StepReport("b", 32, 0.1))
        done = StepDone(step=number, generation=1, seconds=0.1, reports=reports, idle_s=0.25)
        brain.decide(0.1 * number, done)
    assert brain.num_decided < 100
    recorded = brain.tally.totals.idle_s
    assert recorded == pytest.approx(25.0, abs=0.25 * (101 - brain.num_decided))
    step(brain, 100, compute_s=5.0)  # which is decided on
    assert brain.tally.totals.idle_s == pytest.approx(25.0)


def test_totals_that_cannot_be_kept_stop_nothing(
    brain: Brain, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(brain.tally, "add", broken)
    before = brain.num_decided
    for number in range(10):
        step(brain, number)
    assert brain.num_decided > before
    assert caplog.text.count("could not be kept") == 1
    assert "the balancer has stopped" not in caplog.text
