"""The brain of a run: what it is not asked about is not lost on it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import fmean

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


def test_steps_of_another_roster_count_as_samples_only(brain: Brain, tmp_path: Path) -> None:
    for number in range(100):
        step(brain, number)
    before = len(told(tmp_path))
    brain.decide(10.0, Left(workers=("b",)))
    for number in range(100, 200):
        done = StepDone(step=number, generation=2, seconds=0.1, reports=(StepReport("a", 64, 0.1),))
        brain.decide(0.1 * number, done)
    first = told(tmp_path)[before]
    assert first.quiet.num <= first.step - 100
    assert brain.cluster.samples == 64 * (told(tmp_path)[-1].step + 1)


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
