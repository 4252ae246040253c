"""Joining, leaving, stopping and resuming, while things go wrong."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from tests.faults.conftest import Alone
from tests.faults.running import HELD, Running, epochs, same, until

ARGS = [*HELD, "--sum"]


def test_a_worker_is_lost_while_another_joins(tmp_path: Path, alone: Alone) -> None:
    """Those who train are within a step, with a sum to come that a joiner knows nothing of."""
    with Running(tmp_path, workers="5:7", args=ARGS) as run:
        status = run.until_training(5)
        run.ask("scale", num_workers=6)
        run.until(lambda s: any(w["state"] == "ready" or w["rank"] == 5 for w in s["workers"]))
        victim = next(w["worker"] for w in run.status()["workers"] if w["rank"] == 2)
        run.signal(victim)
        run.until_training(6, after=status["generation"])
        assert run.finish() == 0
        assert all(same(result, alone(*ARGS, *run.length)) for result in run.results().values())


def test_a_stopped_worker_is_evicted_and_the_others_go_on(tmp_path: Path, alone: Alone) -> None:
    with Running(tmp_path, args=ARGS, options=["--restarts", "0"]) as run:
        status = run.until_step(5)  # before the first one, more patience is due
        victim = next(w["worker"] for w in status["workers"] if w["rank"] == 2)
        run.signal(victim, signal.SIGSTOP)
        run.until_training(4, after=status["generation"])
        assert run.finish() == 0
        assert len(run.results()) == 4
        assert all(same(result, alone(*ARGS, *run.length)) for result in run.results().values())


def test_sigterm_is_a_notice_and_the_worker_leaves_in_order(tmp_path: Path, alone: Alone) -> None:
    with Running(tmp_path, workers="3", args=ARGS, options=["--restarts", "0"]) as run:
        status = run.until_training(3)
        run.signal("w1", signal.SIGTERM)
        run.until_training(2, after=status["generation"])
        assert run.finish() == 0
        assert "void" not in run.said()
        assert all(same(result, alone(*ARGS, *run.length)) for result in run.results().values())


def test_too_few_workers_wait_and_go_on_when_more_come(tmp_path: Path, alone: Alone) -> None:
    options = ["--min", "3", "--restarts", "1"]
    with Running(tmp_path, workers="3", args=ARGS, options=options) as run:
        status = run.until_training(3)
        run.signal("w1")
        run.until(lambda s: s["state"] == "paused")
        run.until_training(3, after=status["generation"])
        assert run.finish() == 0
        assert all(same(result, alone(*ARGS, *run.length)) for result in run.results().values())


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(tmp_path: Path, alone: Alone) -> None:
    with Running(tmp_path, workers="3", args=ARGS) as run:
        step = run.until_step(20)["step"]
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 0
    args = [*ARGS, *epochs(step + 50)]
    with Running(tmp_path, workers="2", args=args) as run:
        assert run.finish() == 0
        assert "going on from" in run.said()
        assert all(same(result, alone(*args)) for result in run.results().values())


def test_a_paused_run_that_is_stopped_leaves_a_checkpoint(tmp_path: Path, alone: Alone) -> None:
    options = ["--min", "3", "--restarts", "0"]
    with Running(tmp_path, workers="3", args=ARGS, options=options) as run:
        run.until_step(20)
        run.signal("w0")  # the leader, who would have written it
        step = run.until(lambda s: s["state"] == "paused")["step"]
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 0
    args = [*ARGS, *epochs(step + 50)]
    with Running(tmp_path, workers="3", args=args) as run:
        assert run.finish() == 0
        begun = re.search(r"going on from step-(\d+)", run.said())
        assert begun is not None
        assert int(begun[1]) >= step
        assert all(same(result, alone(*args)) for result in run.results().values())


def test_without_its_coordinator_a_run_finishes_its_epochs(tmp_path: Path, alone: Alone) -> None:
    with Running(tmp_path, args=ARGS) as run:
        run.until_step(20)
        pids = run.pids()
        run.process.kill()
        run.process.wait()
        log = run.folder / "logs" / "w0.log"
        until(lambda: log.read_text().count("here") >= 8)  # epochs
        run.go()
        for worker in pids:
            run.until_gone(pids[worker])
        assert len(run.results()) == 5
        assert all(same(result, alone(*ARGS, *run.length)) for result in run.results().values())


def test_a_restarted_coordinator_takes_the_workers_over(tmp_path: Path, alone: Alone) -> None:
    with Running(tmp_path, args=ARGS) as run:
        before = run.until_step(20)
        run.process.kill()
        run.process.wait()
        with Running(tmp_path, args=ARGS) as again:
            after = again.until_training(5)
            assert after["generation"] == before["generation"]
            again.ask("drain", worker="w1")
            again.until_training(4, after=before["generation"])
            assert again.finish() == 0
        assert "void" not in again.said()
        assert len(run.results()) == 4
        assert all(same(result, alone(*ARGS, *run.length)) for result in run.results().values())
