"""`evenstep run` as people start it: real interpreters, a coordinator that can be killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.conftest import Alone
from tests.faults.running import Running
from tests.faults.watching import HELD, epochs, same, until

ARGS = [*HELD, "--sum"]


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(tmp_path: Path, alone: Alone) -> None:
    with Running(tmp_path, workers="2", args=ARGS) as run:
        step = run.until_step(20)["step"]
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 0
        assert "SIGABRT" not in run.said()
    args = [*ARGS, *epochs(step + 50)]
    with Running(tmp_path, workers="1", args=args) as run:
        assert run.finish() == 0
        assert "resuming from" in run.said()
        assert all(same(result, alone(*args)) for result in run.results().values())


def test_a_lost_worker_is_replaced_and_a_coordinator_too(tmp_path: Path, alone: Alone) -> None:
    """Worker and coordinator are killed; without a coordinator the workers train on."""
    with Running(tmp_path, workers="3", args=ARGS) as run:
        generation = run.until_step(20)["generation"]
        run.signal("w1")
        before = run.until_training(3, after=generation)
        run.process.kill()
        run.process.wait()
        log = run.folder / "logs" / "w0.log"
        known = log.read_text().count("here")
        until(lambda: log.read_text().count("here") >= known + 3)  # epochs
        with Running(tmp_path, workers="3", args=ARGS) as again:
            after = again.until_training(3)
            assert after["generation"] == before["generation"]
            again.ask("drain", worker="w2")
            again.until_training(2, after=after["generation"])
            assert again.finish() == 0
        assert again.said().count("void") == run.said().count("void")  # those of the lost worker
        assert "SIGABRT" not in run.said()
        assert sorted(run.results()) == ["w0", "w3"]
        assert all(same(result, alone(*ARGS, *run.length)) for result in run.results().values())


@pytest.mark.long
def test_without_its_coordinator_a_run_finishes_its_epochs(tmp_path: Path, alone: Alone) -> None:
    with Running(tmp_path, workers="3", args=ARGS) as run:
        run.until_step(20)
        pids = run.pids()
        run.process.kill()
        run.process.wait()
        run.go()
        for worker in pids:
            run.until_gone(pids[worker])
        assert len(run.results()) == 3
        assert all(same(result, alone(*ARGS, *run.length)) for result in run.results().values())
