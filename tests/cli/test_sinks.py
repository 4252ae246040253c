"""`evenstep run --sink`: real processes, sinks found by their entry points, files read back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from bench.testbed.source_tree import PYTHONPATH
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evenstep.coordinate import service
from evenstep.observe.feed import SinkFeed
from tests.cli.installed import install
from tests.cli.test_run import BOUND_S, LONG, SCRIPT, Clocked, Runs

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_sink"

STAND_IN = '''"""What the example needs of Weights & Biases."""

import asyncio
import json
from pathlib import Path


class Run:
    def __init__(self, project):
        self._path = Path(f"{project}.log")

    def log(self, figures, step):
        with self._path.open("a") as file:
            file.write(json.dumps([step, figures]) + "\\n")

    def finish(self):
        with self._path.open("a") as file:
            file.write(json.dumps("finished") + "\\n")


def init(project):
    return Run(project)
'''


@pytest.fixture
def own_sink(tmp_path: Path) -> dict[str, str]:
    """An environment with the sink in examples/, and a stand-in for its package."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "wandb.py").write_text(STAND_IN)
    env = install(EXAMPLE, site)
    return {**env, "PYTHONPATH": os.pathsep.join([env["PYTHONPATH"], PYTHONPATH])}


def test_a_run_writes_its_figures_to_every_sink(tmp_path: Path, own_sink: dict[str, str]) -> None:
    sinks = ["jsonlines:figures.jsonl", "tensorboard:board", "prometheus:run.prom", "wandb:mine"]
    options = ["--workers", "2", "--run", "run", *(f"--sink={sink}" for sink in sinks)]
    done = subprocess.run(
        [sys.executable, "-m", "evenstep", "run", *options, SCRIPT, "30"],
        cwd=tmp_path,
        env=own_sink,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert done.returncode == 0, done.stderr
    *_, last = map(json.loads, (tmp_path / "figures.jsonl").read_text().splitlines())
    assert last["num_steps"] > 0
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert board.Scalars("num_steps")[-1].value == last["num_steps"]
    *_, logged, end = map(json.loads, (tmp_path / "mine.log").read_text().splitlines())
    assert logged == [last["step"], {k: x for k, x in last.items() if k != "unix_s"}]
    assert end == "finished"
    assert not (tmp_path / "run.prom").exists()  # nobody scrapes a run that is over


def test_a_sink_that_does_not_exist_is_refused_before_anything_starts(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    done = runs.run("run", "--run", "run", "--sink", "jsonline:x", SCRIPT, "3")
    runs.close()
    assert done.returncode == 2
    assert "--sink: unknown name 'jsonline'; did you mean jsonlines?" in done.stderr
    assert list(tmp_path.iterdir()) == []


class Failing:
    """A sink that fails from its tenth write on."""

    num = 0

    def write(self, unix_s: float, step: int, figures: Mapping[str, float]) -> None:
        self.num += 1
        if self.num >= 10:
            raise OSError("quota exceeded")

    def close(self) -> None: ...


class Hanging(Failing):
    """A sink that hangs in its first write until it is let go."""

    let_go = threading.Event()

    def write(self, unix_s: float, step: int, figures: Mapping[str, float]) -> None:
        assert self.let_go.wait(BOUND_S)


def test_a_run_trains_on_whatever_its_sinks_do_and_says_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setattr(service, "EVERY_S", 0.02)
    feed = SinkFeed({"failing": Failing(), "hanging": Hanging()})
    clocked = Clocked(tmp_path / "run", LONG, sinks=feed)
    coordinator = clocked.run._service

    async def meanwhile() -> None:
        async with asyncio.timeout(BOUND_S):
            while len(coordinator.status()["problems"]) < 2:
                await asyncio.sleep(0.02)
            step = coordinator.status()["step"]
            while coordinator.status()["step"] < step + 10:
                await asyncio.sleep(0.02)
        clocked.run.on_signal(signal.SIGTERM)

    ending = clocked.run_to_end(meanwhile)
    Hanging.let_go.set()
    assert ending.ok
    told = [r.getMessage() for r in caplog.records]
    for once in (
        "sink failing failed: OSError: quota exceeded; the run goes on",
        "sink hanging does not keep up: 12 writes wait for it; the run goes on",
        "sink hanging has not finished: it is left behind, and 12 writes still wait",
    ):
        assert sum(once in line for line in told) == 1, told
