"""`evenstep run --on slurm` on a real Slurm: workers come, go and die, and the run is the same."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from bench.testbed.cli_run import ENVIRONMENT, EVENSTEP
from bench.testbed.live_run import until
from bench.testbed.slurm import Slurm

from tests.faults.conftest import Alone, alone
from tests.launch.engines.stories import EngineRun

__all__ = ["alone"]

KINDS = ["--kind", "cpu=3", "--kind", "cpu=2,constraint=wide"]

pytestmark = pytest.mark.long


def on(cluster: Slurm, folder: Path, *more: str, workers: str = "2:8") -> EngineRun:
    engine = ["slurm", "--partition", "p", *KINDS, *more]
    return EngineRun(folder, engine, workers=workers, env=cluster.variables)


def job_of(cluster: Slurm, worker: str) -> str:
    """ARRAY_INDEX of a worker's job."""
    columns = "Name:|,ArrayJobID:|,ArrayTaskID:|"
    lines = cluster.run("squeue", "--me", "-h", "--array", "-O", columns)
    for line in lines.splitlines():
        name, array, index, *_ = (part.strip() for part in line.split("|"))
        if worker == f"w{int(name.rpartition('+')[2]) + int(index)}":
            return f"{array}_{index}"
    raise AssertionError(f"no job of {worker} in {lines}")


def test_a_run_grows_shrinks_and_loses_workers_and_its_coordinator(
    slurm_cluster: Slurm, tmp_path: Path, alone: Alone
) -> None:
    with on(slurm_cluster, tmp_path) as run:
        run.until_training(2)
        assert run.kinds() == {"w0": "cpux3", "w1": "cpux2"}
        run.scale(3)
        run.until_training(3)
        slurm_cluster.run("scancel", "--signal=KILL", "--batch", job_of(slurm_cluster, "w1"))
        run.until_worker("w3", "training")  # in place of w1
        run.until_training(3)
        run.scale(2)
        run.until_training(2)
        run.process.kill()
        run.process.wait()
        with on(slurm_cluster, tmp_path, workers="2") as again:
            before = again.until_training(2)
            again.scale(3)
            again.until_training(3, after=before["generation"])
            assert again.finish() == 0
            assert again.is_same_as(alone)
        assert "in place of" in run.output()
    until(lambda: not slurm_cluster.run("squeue", "--me", "-h"))  # nothing is left


def test_a_preempted_worker_leaves_in_order_and_a_request_is_given_up(
    slurm_cluster: Slurm, tmp_path: Path, alone: Alone
) -> None:
    with on(slurm_cluster, tmp_path, "--kind", "cpu=4,name=all", "--pending", "6s") as run:
        run.until_training(2)
        # All CPUs of the node that w1 needs; Slurm asks it to leave, and has a grace of 20 s.
        job = ["sbatch", "--parsable", "--partition=urgent", "--exclusive", "--nodelist=n1"]
        other = slurm_cluster.run(*job, "--output=/dev/null", "--wrap", "sleep 600").strip()
        assert other
        run.until(lambda status: all(row["worker"] != "w1" for row in status["workers"]))
        run.until(lambda status: "w1" not in run.pids())
        assert "is lost" not in run.output(), "it has left in order"
        until(lambda: any("given up after 6 s" in f.cause for f in run.failures()))
        run.until_trains_on()
        slurm_cluster.run("scancel", other)
        assert run.finish() == 0
        assert run.is_same_as(alone)


def test_training_goes_on_while_slurm_does_not_answer(
    slurm_cluster: Slurm, tmp_path: Path, alone: Alone
) -> None:
    with on(slurm_cluster, tmp_path) as run:
        run.until_training(2)
        slurm_cluster.signal("slurmctld", signal.SIGSTOP)
        try:
            run.scale(3)
            run.until_trains_on()
            run.until(lambda status: any("slurm" in problem for problem in status["problems"]))
            run.until_trains_on()
        finally:
            slurm_cluster.signal("slurmctld", signal.SIGCONT)
        run.until_training(3)
        assert run.finish() == 0
        assert run.is_same_as(alone)
    until(lambda: not slurm_cluster.run("squeue", "--me", "-h"))  # asked for once


def test_a_refused_request_is_in_the_journal_and_training_goes_on(
    slurm_cluster: Slurm, tmp_path: Path, alone: Alone
) -> None:
    kinds = ["--kind", "cpu=3,name=a", "--kind", "cpu=3,name=b,constraint=none-such"]
    engine = ["slurm", "--partition", "p", *kinds]
    with EngineRun(tmp_path, engine, workers="1:4", env=slurm_cluster.variables) as run:
        run.until_training(1)
        run.scale(3)
        until(lambda: bool(run.failures()))
        assert "slurm: sbatch: error" in run.failures()[0].cause
        run.until_trains_on()
        assert run.finish() == 0
        assert run.is_same_as(alone)


def test_srun_join_inside_an_allocation(slurm_cluster: Slurm, tmp_path: Path) -> None:
    """A coordinator that starts no workers, and a job of the user's own that brings some."""
    with EngineRun(tmp_path, ["local"], workers="0:4") as run:
        until(lambda: (run.folder / "address").exists())
        join = f"srun --ntasks=2 {EVENSTEP} join {run.folder} {' '.join(run.command)}"
        variables = ("PYTHONPATH", "HELD_BY", "OMP_NUM_THREADS")
        exports = "\n".join(f"export {name}={ENVIRONMENT[name]}" for name in variables)
        script = tmp_path / "job.sh"
        script.write_text(f"#!/bin/sh\n{exports}\n{join}\n")
        log = tmp_path / "job.log"
        job = slurm_cluster.run(
            "sbatch", "--parsable", "--ntasks=2", f"--output={log}", str(script)
        ).strip()
        run.until_training(2)
        slurm_cluster.run("scancel", "--signal=TERM", f"{job}.0")
        run.until(lambda status: not run.pids())
        assert "is lost" not in run.output(), log.read_text()
        slurm_cluster.run("scancel", job)
