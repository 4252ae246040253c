"""Joins, drains, evictions, pauses and resumes under faults."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from bench.testbed.live_run import HELD, epoch_args, same, until

from tests.faults.cluster import Cluster
from tests.faults.conftest import Alone

ARGS = [*HELD, "--sum"]


def test_a_worker_is_lost_while_another_joins(tmp_path: Path, alone: Alone) -> None:
    """Survivors are mid-step, with a sum to come that the joiner cannot take part in."""
    with Cluster(tmp_path, workers=5, max_workers=7, restarts=1, args=ARGS) as run:
        status = run.until_training(5)
        run.ask("scale", num_workers=6)
        run.until(lambda s: any(w["state"] == "ready" or w["rank"] == 5 for w in s["workers"]))
        victim = next(w["worker"] for w in run.status()["workers"] if w["rank"] == 2)
        run.signal(victim)
        run.until_training(6, after=status["generation"])
        totals = run.until(lambda s: s["totals"]["idle_s"] > 0.0)["totals"]
        assert totals["num_lost"] == 1
        assert totals["num_changes"] >= 1
        assert run.finish() == 0
        assert all(same(result, alone(*ARGS, *run.epochs)) for result in run.results().values())


@pytest.mark.long  # it must be silent for longer than a busy machine makes the others
def test_a_stopped_worker_is_evicted_and_the_others_train_on(tmp_path: Path, alone: Alone) -> None:
    with Cluster(tmp_path, workers=5, args=ARGS, silence_s=15.0) as run:
        status = run.until_step(5)  # before its first step, a worker may be silent for longer
        victim = next(w["worker"] for w in status["workers"] if w["rank"] == 2)
        run.signal(victim, signal.SIGSTOP)
        run.until_training(4, after=status["generation"])
        assert run.finish() == 0
        assert len(run.results()) == 4
        assert all(same(result, alone(*ARGS, *run.epochs)) for result in run.results().values())


def test_a_worker_leaves_on_sigterm_and_is_replaced(tmp_path: Path, alone: Alone) -> None:
    with Cluster(tmp_path, workers=3, args=ARGS) as run:
        run.until_training(3)
        run.signal("w1", signal.SIGTERM)
        ranked = {"w0", "w2", "w3"}
        run.until(lambda s: {w["worker"] for w in s["workers"] if w["rank"] is not None} == ranked)
        assert run.finish() == 0
        assert "void" not in run.output()
        assert all(same(result, alone(*ARGS, *run.epochs)) for result in run.results().values())


def test_too_few_workers_pause_until_the_lost_one_is_replaced(tmp_path: Path, alone: Alone) -> None:
    with Cluster(tmp_path, workers=3, restarts=1, sets=("workers.min=3",), args=ARGS) as run:
        status = run.until_training(3)
        run.signal("w1")
        run.until(lambda s: s["state"] == "paused")
        run.until_training(3, after=status["generation"])
        assert run.finish() == 0
        assert all(same(result, alone(*ARGS, *run.epochs)) for result in run.results().values())


@pytest.mark.parametrize(
    "fault", [("w1", "reduced", 3), ("w1", "stepped", 3), ("w1", "epoch", 10), ("w1", "forward", 3)]
)
def test_a_joiner_of_a_paused_run_waits_for_the_others_next_batch(
    tmp_path: Path, alone: Alone, fault: tuple[str, str, int]
) -> None:
    """They may be short of a sum, in the middle of a step or between epochs."""
    with Cluster(
        tmp_path, workers=3, restarts=1, sets=("workers.min=3",), faults=[fault], args=ARGS
    ) as run:
        run.until(lambda s: s["state"] == "paused")
        run.until_training(3)
        assert run.finish() == 0
        assert all(same(result, alone(*ARGS, *run.epochs)) for result in run.results().values())


def test_a_paused_run_that_is_stopped_leaves_a_checkpoint(tmp_path: Path, alone: Alone) -> None:
    with Cluster(tmp_path, workers=3, sets=("workers.min=3",), args=ARGS) as run:
        run.until_step(20)
        run.signal("w0")  # the leader, which would have written it
        step = run.until(lambda s: s["state"] == "paused")["step"]
        run.ask("stop")
        assert run.wait() == 0
    args = [*ARGS, *epoch_args(step + 50)]
    with Cluster(tmp_path, workers=3, args=args) as run:
        assert run.finish() == 0
        resumed = re.search(r"resuming from step-(\d+)", run.output())
        assert resumed is not None
        assert int(resumed[1]) >= step
        assert all(same(result, alone(*args)) for result in run.results().values())


@pytest.mark.parametrize("point", [pytest.param("forward", marks=pytest.mark.long), "stepped"])
def test_a_script_asleep_on_all_workers_does_not_delay_a_stop(
    tmp_path: Path, alone: Alone, point: str
) -> None:
    """The step at hand is rolled back; where that is not possible, the checkpoint before stands."""
    args = [*ARGS, "--asleep", f"{point}-12"]
    every_s = 3600.0 if point == "forward" else 1e-3
    with Cluster(tmp_path, workers=3, args=args, checkpoint_every_s=every_s) as run:
        until(lambda: run.output().count("asleep") == 3)
        run.ask("stop")
        assert run.wait() == 0
        assert "it does not leave" not in run.output()
        assert ("the newest checkpoint stands" in run.output()) == (point == "stepped")
    args = [*ARGS, *epoch_args(50)]
    with Cluster(tmp_path, workers=2, args=args) as run:
        assert run.finish() == 0
        assert "resuming from step-00000012" in run.output()
        assert all(same(result, alone(*args)) for result in run.results().values())


def test_the_end_of_training_leaves_a_checkpoint_of_the_last_step(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=2, args=["--epochs", "1"]) as run:
        assert run.finish() == 0
        assert [p.name for p in run.folder.glob("checkpoints/*")] == ["step-00000010.pt"]
