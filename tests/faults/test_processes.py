"""`evenstep run` end to end: real interpreters and a coordinator that can be killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from bench.testbed.cli_run import CliRun
from bench.testbed.live_run import HELD, epoch_args, same, until

from tests.faults.conftest import Alone

ARGS = [*HELD, "--sum"]


@pytest.mark.long
def test_ctrl_c_leaves_a_checkpoint_to_resume_from(tmp_path: Path, alone: Alone) -> None:
    with CliRun(tmp_path, workers="2", args=ARGS) as run:
        step = run.until_step(20)["step"]
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 0
        assert "SIGABRT" not in run.output()
    args = [*ARGS, *epoch_args(step + 50)]
    with CliRun(tmp_path, workers="1", args=args) as run:
        assert run.finish() == 0
        assert "resuming from" in run.output()
        assert all(same(result, alone(*args)) for result in run.results().values())


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--tls",)])
def test_a_killed_worker_and_a_killed_coordinator_are_replaced(
    tmp_path: Path, alone: Alone, options: tuple[str, ...]
) -> None:
    """Without a coordinator the workers train on."""
    with CliRun(tmp_path, workers="3", args=ARGS, options=options) as run:
        generation = run.until_step(20)["generation"]
        run.signal("w1")
        before = run.until_training(3, after=generation)
        run.process.kill()
        run.process.wait()
        log = run.folder / "logs" / "w0.log"
        known = log.read_text().count("here")
        until(lambda: log.read_text().count("here") >= known + 3)  # logged once per epoch
        with CliRun(tmp_path, workers="3", args=ARGS, options=options) as again:
            after = again.until_training(3)
            assert after["generation"] == before["generation"]
            again.ask("drain", worker="w2")
            again.until_training(2, after=after["generation"])
            assert again.finish() == 0
        assert again.output().count("void") == run.output().count(
            "void"
        )  # none since the lost worker
        assert "SIGABRT" not in run.output()
        assert sorted(run.results()) == ["w0", "w3"]
        assert all(same(result, alone(*ARGS, *run.epochs)) for result in run.results().values())


@pytest.mark.long
def test_without_its_coordinator_a_run_finishes_its_epochs(tmp_path: Path, alone: Alone) -> None:
    with CliRun(tmp_path, workers="3", args=ARGS) as run:
        run.until_step(20)
        pids = run.pids()
        run.process.kill()
        run.process.wait()
        run.go()
        for worker in pids:
            run.wait_for_exit(pids[worker])
        assert len(run.results()) == 3
        assert all(same(result, alone(*ARGS, *run.epochs)) for result in run.results().values())
