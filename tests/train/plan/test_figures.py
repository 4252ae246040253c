"""Figures of a run without a coordinator, on their way to sinks."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from evenstep.config import Settings
from evenstep.engine import Engine
from evenstep.errors import ConfigError
from evenstep.launch.environment import CoordinatorAddress
from evenstep.observe.feed import EVERY_S, SinkFeed
from evenstep.strict import build
from evenstep.train.join import join
from evenstep.train.plan.figures import LocalFigures
from evenstep.train.session import Session
from evenstep.types import Joined, StepDone, StepReport, Steps, Worker
from tests.train.ranks import run_ranks

WAIT_S = 600.0


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.written: list[tuple[int, Mapping[str, float]]] = []

    def write(self, unix_s: float, step: int, figures: Mapping[str, float]) -> None:
        self.written.append((step, figures))

    def close(self) -> None: ...


class Hanging(Kept):
    """A sink that hangs in its first write until it is let go."""

    let_go = threading.Event()

    def write(self, unix_s: float, step: int, figures: Mapping[str, float]) -> None:
        assert self.let_go.wait(WAIT_S)


class Broken(Kept):
    """A sink that takes nothing."""

    def write(self, unix_s: float, step: int, figures: Mapping[str, float]) -> None:
        raise ConnectionError("refused")


def train(session: Session) -> int:
    """Train two epochs of five steps; returns the last step."""
    model = torch.nn.Linear(3, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = session.loader(DATA, batch=8)
    for _ in session.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
    return session.step


DATA = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))


def test_ranks_of_torchrun_write_the_figures_of_all_once(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    assert run_ranks(2, train, [f"jsonlines:{path}"]) == [10, 10]
    first, *_, last = map(json.loads, path.read_text().splitlines())
    assert first["step"] == 0
    assert first["num_workers"] == 2
    assert first["share/w0"] + first["share/w1"] == first["batch"] == 8
    assert last["is_training"] == 1
    assert last["compute_s/w1"] > 0
    assert last["num_steps"] == 10
    assert last["position"] == 80
    assert last["epoch"] == 2


def test_ranks_train_on_with_sinks_that_hang_and_fail_and_the_log_tells_each_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert run_ranks(2, train, [Hanging, Broken]) == [10, 10]
    assert not Hanging.let_go.is_set()
    Hanging.let_go.set()
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert sum("sink Hanging has not finished: it is left behind" in line for line in told) == 1
    assert sum("sink Broken failed: ConnectionError: refused" in line for line in told) == 1


def test_only_rank_0_makes_a_sink() -> None:
    made: list[Kept] = []

    def make() -> Kept:
        made.append(Kept())
        return made[-1]

    run_ranks(2, train, [make])
    assert len(made) == 1
    assert made[0].written


def test_a_worker_of_evenstep_run_is_told_where_to_give_sinks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = CoordinatorAddress(host="127.0.0.1", port=1, token="")
    monkeypatch.setattr("evenstep.train.join.read_environment", lambda _: coordinator)
    monkeypatch.setattr("evenstep.train.join.elastic_session", lambda *_: None)
    join(sinks=[Kept])
    assert "give them to `evenstep run --sink`" in caplog.text


def test_a_sink_that_cannot_be_opened_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(ConfigError, match="sinks: unknown name 'jsonline'; did you mean jsonlines"):
        run_ranks(1, train, ["jsonline:x"])


def follow(figures: LocalFigures, engine: Engine, at_s: float, event: Joined | StepDone) -> None:
    figures.follow(engine)
    engine.handle(at_s, event)
    figures.add(engine)


def step(number: int, num_quiet: int = 0) -> StepDone:
    return StepDone(
        step=number,
        generation=1,
        seconds=0.5,
        reports=(StepReport("a", 30, 0.25), StepReport("b", 34, 0.5, 0.125)),
        quiet=Steps(num=num_quiet, seconds=0.5 * num_quiet, samples=64 * num_quiet),
        position=64 * (number + 1),
    )


def test_figures_are_those_since_the_last_write_and_of_the_newest_step() -> None:
    engine = Engine(build(Settings, {"batch": {"size": 64}, "workers": {"min": 2}}))
    sink = Kept()
    feed = SinkFeed({"kept": sink})
    figures = LocalFigures(feed, epoch_samples=640, num_epochs=lambda: 3)
    joined = Joined(workers=(Worker(id="a"), Worker(id="b")))
    follow(figures, engine, 0.0, joined)
    follow(figures, engine, 0.5, step(0))
    follow(figures, engine, 3.0, step(4, 3))
    follow(figures, engine, 0.5 + EVERY_S, step(9, 4))
    figures.offer_last()  # nothing is new
    feed.close(WAIT_S)
    assert [step for step, _ in sink.written] == [0, 9]
    _, last = sink.written[-1]
    assert last["samples_per_s"] == 128
    assert 0 < last["part_of_limit"] <= 1
    assert last["num_steps"] == 10
    assert last["position"] == 640
    assert last["epoch"] == 1
    assert last["seconds_left"] > 0
    assert (last["share/a"], last["wait_s/b"]) == (30, 0.125)


def test_without_sinks_nothing_is_kept_up() -> None:
    engine = Engine(build(Settings, {"batch": {"size": 64}, "workers": {"min": 2}}))
    figures = LocalFigures(SinkFeed())
    joined = Joined(workers=(Worker(id="a"), Worker(id="b")))
    follow(figures, engine, 0.0, joined)
    assert figures._tally.totals.elapsed_s == 0


def test_a_mistake_in_the_figures_stops_no_planning(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(build(Settings, {"batch": {"size": 64}, "workers": {"min": 2}}))

    def wrong() -> int:
        raise ZeroDivisionError

    sink = Kept()
    feed = SinkFeed({"kept": sink})
    figures = LocalFigures(feed, 640, wrong)
    follow(figures, engine, 0.0, Joined(workers=(Worker(id="a"), Worker(id="b"))))
    follow(figures, engine, 1.0, step(0))
    figures.offer_last()
    feed.close(WAIT_S)
    assert sink.written == []
    assert [r.getMessage() for r in caplog.records] == ["the sinks get no more figures"]
