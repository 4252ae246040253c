"""A run goes on whatever its engine does: calls that hang, fail or are refused."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from evenstep.launch import remote as module
from evenstep.launch.console import ConsoleOutput
from evenstep.launch.remote import RemoteWorkers
from evenstep.launch.requests import (
    News,
    RequestUnmet,
    WorkerEnded,
    WorkerFound,
    WorkerLeaves,
    WorkerRuns,
)
from evenstep.ports import LaunchRefusedError, Observed, Stage

RUNNING, PENDING = Observed(stage=Stage.RUNNING), Observed(stage=Stage.PENDING, why="no room")
BOUND_S = 600.0


class StandIn:
    """An engine whose every call can be made to hang or fail."""

    def __init__(self) -> None:
        self.shown: dict[str, Observed] = {}
        self.started: list[tuple[str, str]] = []
        self.takes = RUNNING  # what becomes of workers that are asked for
        self.errors: dict[str, Exception] = {}  # by method
        self.gates: dict[str, threading.Event] = {}  # by method: calls wait
        self.num_calls = dict.fromkeys(("start", "stop", "observe"), 0)

    def start(self, kind: str, workers: Sequence[str]) -> None:
        self._call("start")
        self.started += [(kind, worker) for worker in workers]
        self.shown.update(dict.fromkeys(workers, self.takes))

    def stop(self, workers: Sequence[str]) -> None:
        self._call("stop")
        ended = Observed(stage=Stage.ENDED, exit_code=75)
        self.shown.update({w: ended for w in workers if w in self.shown})

    def observe(self) -> Mapping[str, Observed]:
        self._call("observe")
        return dict(self.shown)

    def close(self) -> None:
        pass

    def _call(self, name: str) -> None:
        self.num_calls[name] += 1
        if gate := self.gates.get(name):
            gate.wait()
        if error := self.errors.get(name):
            raise error


class Watched:
    """Workers on a stand-in, and the news that it tells."""

    def __init__(self, folder: Path, *, kinds: Sequence[str] = ("cpu",), **more: Any) -> None:
        self.engine, self.news = StandIn(), list[News]()
        self.workers = RemoteWorkers(
            self.engine,
            engine="standin",
            kinds=kinds,
            logs=folder,
            console=ConsoleOutput(io.StringIO()),
            tell=self.news.append,
            poll_s=0.01,
            **more,
        )

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            await asyncio.sleep(0.01)

    def told(self, *kinds: type[Any]) -> list[News]:
        return [item for item in self.news if isinstance(item, kinds)]


def run(what: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(what, BOUND_S))


def test_workers_start_run_and_end(tmp_path: Path) -> None:
    async def story() -> None:
        watched = Watched(tmp_path)
        watched.workers.start("cpu", ["w0", "w1"])
        await watched.until(lambda: len(watched.told(WorkerRuns)) == 2)
        assert (tmp_path / "w1.log").exists(), "which reserves its name for later coordinators"
        watched.engine.shown["w0"] = Observed(stage=Stage.ENDED, exit_code=3)
        await watched.until(lambda: watched.told(WorkerEnded))
        assert watched.workers.running == {"w1"}
        await watched.workers.end_all()
        assert watched.workers.running == set()

    run(story())


def test_an_engine_that_hangs_holds_up_nothing_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANG_S", 0.05)
    caplog.set_level(logging.INFO, "evenstep")

    async def story() -> None:
        watched = Watched(tmp_path)
        gate = watched.engine.gates["start"] = threading.Event()
        watched.workers.start("cpu", ["w0"])
        await watched.until(lambda: watched.workers.problems)
        assert "start: has not answered" in watched.workers.problems[0]
        looks = watched.engine.num_calls["observe"]
        await watched.until(lambda: watched.engine.num_calls["observe"] > looks + 3)
        watched.workers.start("cpu", ["w1"])
        looks = watched.engine.num_calls["observe"]
        await watched.until(lambda: watched.engine.num_calls["observe"] > looks + 3)
        assert watched.engine.num_calls["start"] == 1, "it is not asked a second time meanwhile"
        gate.set()
        await watched.until(lambda: len(watched.told(WorkerRuns)) == 2)
        assert watched.workers.problems == []
        await watched.workers.end_all()

    run(story())
    assert [m for m in caplog.messages if "has not answered" in m] == [
        "standin: start: has not answered for over 0.05 s; training goes on, and it is tried again"
    ]
    assert "standin: start works again" in caplog.messages


def test_a_start_that_fails_is_repeated_until_it_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        watched = Watched(tmp_path, limit_s=BOUND_S)
        watched.engine.errors["start"] = OSError("no controller")
        watched.workers.start("cpu", ["w0"])
        await watched.until(lambda: watched.engine.num_calls["start"] == 2)
        assert watched.news == []
        assert "no controller" in watched.workers.problems[0]
        del watched.engine.errors["start"]
        await watched.until(lambda: watched.told(WorkerRuns))
        assert watched.engine.started == [("cpu", "w0")]
        await watched.workers.end_all()

    run(story())


def test_a_refused_request_is_given_up_at_once_and_the_other_kind_is_tried_next(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        watched = Watched(tmp_path, kinds=["gpu", "cpu"])
        watched.engine.errors["start"] = LaunchRefusedError("no such partition")
        watched.workers.start("gpu", ["w0"])
        await watched.until(lambda: watched.news)
        (told,) = watched.news
        assert told == RequestUnmet(workers=("w0",), cause="standin: no such partition")
        watched.engine.errors.clear()
        watched.workers.start("", ["w1"])
        await watched.until(lambda: watched.told(WorkerRuns))
        assert watched.engine.started == [("cpu", "w1")]
        await watched.workers.end_all()

    run(story())


def test_a_request_that_is_not_met_is_given_up_and_withdrawn(tmp_path: Path) -> None:
    async def story() -> None:
        watched = Watched(tmp_path, limit_s=0.2)
        watched.engine.takes = PENDING
        watched.workers.start("cpu", ["w0"])
        await watched.until(lambda: watched.told(RequestUnmet))
        await watched.until(lambda: watched.engine.shown["w0"].stage is Stage.ENDED)
        await watched.until(lambda: not watched.workers.running)
        cause = "given up after 0.2 s: pending: no room"
        assert watched.news == [RequestUnmet(workers=("w0",), cause=cause)]
        await watched.workers.end_all()

    run(story())


def test_kinds_take_turns_if_the_run_does_not_care(tmp_path: Path) -> None:
    async def story() -> None:
        watched = Watched(tmp_path, kinds=["gpu", "cpu"])
        watched.workers.start("", ["w0", "w1", "w2", "w3"])
        await watched.until(lambda: len(watched.told(WorkerRuns)) == 4)
        assert sorted(kind for kind, _ in watched.engine.started) == ["cpu", "cpu", "gpu", "gpu"]
        await watched.workers.end_all()

    run(story())


def test_an_observation_that_fails_ends_nobody(tmp_path: Path) -> None:
    async def story() -> None:
        watched = Watched(tmp_path)
        watched.workers.start("cpu", ["w0"])
        await watched.until(lambda: watched.told(WorkerRuns))
        watched.engine.errors["observe"] = OSError("head is gone")
        before = watched.engine.num_calls["observe"]
        await watched.until(lambda: watched.engine.num_calls["observe"] > before + 3)
        assert watched.workers.running == {"w0"}
        assert "head is gone" in watched.workers.problems[0]
        watched.engine.errors.clear()
        await watched.until(lambda: not watched.workers.problems)
        assert not watched.told(WorkerEnded)
        await watched.workers.end_all()

    run(story())


def test_workers_of_an_earlier_coordinator_are_adopted(tmp_path: Path) -> None:
    async def story() -> None:
        watched = Watched(tmp_path)
        watched.engine.shown = {"w4": RUNNING}
        shown = await watched.workers.look_first()
        assert shown is not None
        watched.workers.adopt(shown)
        assert watched.news == [WorkerFound(worker="w4"), WorkerRuns(worker="w4")]
        assert watched.workers.running == {"w4"}
        await watched.workers.end_all()

    run(story())


@pytest.mark.parametrize("fault", ["hang", "fail"])
def test_a_run_is_resumed_although_the_engine_does_not_answer(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        watched = Watched(tmp_path)
        if fault == "hang":
            watched.engine.gates["observe"] = threading.Event()
        else:
            watched.engine.errors["observe"] = OSError("no route")
        assert await watched.workers.look_first(0.05 if fault == "hang" else BOUND_S) is None
        for gate in watched.engine.gates.values():
            gate.set()
        watched.workers.close()

    run(story())
    assert "does not show which workers still run" in caplog.text


def test_a_host_that_is_about_to_go_is_told(tmp_path: Path) -> None:
    async def story() -> None:
        watched = Watched(tmp_path)
        watched.engine.takes = Observed(stage=Stage.RUNNING, leaves="node drains")
        watched.workers.start("cpu", ["w0"])
        await watched.until(lambda: watched.told(WorkerLeaves))
        assert watched.told(WorkerLeaves) == [WorkerLeaves(worker="w0", why="node drains")]
        await watched.workers.end_all()

    run(story())
