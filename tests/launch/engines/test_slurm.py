"""The Slurm launcher on a real Slurm, and what it says to sbatch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from bench.testbed.slurm import Slurm

from evenstep.errors import ConfigError
from evenstep.launch.engines import slurm as module
from evenstep.launch.engines.slurm import SlurmLauncher, batch_script, read_row, submit_command
from evenstep.launch.kinds import parse_kind
from evenstep.ports import EngineJob, LaunchRefusedError, Observed, Stage, WorkerKind
from evenstep.testing import LauncherContract


@pytest.mark.long
class TestSlurm(LauncherContract):
    kind = WorkerKind(name="cpux2", cpus=2)

    @pytest.fixture(autouse=True)
    def _slurm(self, on_slurm: Slurm) -> None:
        pass

    def made(self, job: EngineJob) -> SlurmLauncher:
        return SlurmLauncher(job)


def job(folder: Path, *kinds: str) -> EngineJob:
    named = {kind.name: kind for kind in map(parse_kind, kinds or ("cpu=2",))}
    return EngineJob(
        run="r-1",
        folder=folder,
        command=("train.py", "--name", "two words"),
        env={"EVENSTEP_COORDINATOR": "10.0.0.1:1", "EVENSTEP_TOKEN_FILE": str(folder / "token")},
        token="secret",
        kinds=named,
        options={"partition": "p"},
    )


def test_a_real_slurm_runs_a_worker_and_refuses_what_it_cannot(
    on_slurm: Slurm, tmp_path: Path
) -> None:
    """The quick part of the contract."""
    bad = SlurmLauncher(job(tmp_path, "cpu=2,constraint=none-such"))
    with pytest.raises(LaunchRefusedError, match="sbatch: error"):
        bad.start("cpux2", ["w0"])
    contract = TestSlurm()
    with contract.opened(tmp_path) as launcher:
        launcher.start("cpux2", ["w4"])
        contract.until_runs(tmp_path, "w4")
        shown = contract.until(launcher, lambda shown: "w4" in shown)
        assert shown["w4"].stage is Stage.RUNNING


def test_what_sbatch_is_asked_for(tmp_path: Path) -> None:
    kind = parse_kind("gpu=A100:4,cpu=8,memory=64G,time=2:00:00,signal=B:TERM@300")
    command = submit_command("evenstep-r-1", 7, [7, 9], job(tmp_path), kind)
    for option in (
        "--array=0,2",
        "--job-name=evenstep-r-1+7",
        "--cpus-per-task=8",
        "--gres=gpu:A100:4",
        "--mem=65536M",
        "--partition=p",
        "--time=2:00:00",
        "--signal=B:TERM@300",
        "--no-requeue",
    ):
        assert option in command
    assert "--signal=B:TERM@60" not in command
    script = batch_script(7, tmp_path, ["train.py", "two words"])
    assert "w$((7 + SLURM_ARRAY_TASK_ID))" in script
    assert "train.py 'two words'" in script
    assert "secret" not in " ".join(command) + script


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ("PENDING|0|Resources", Observed(stage=Stage.PENDING, why="Slurm: Resources")),
        ("CONFIGURING|0|None", Observed(stage=Stage.PENDING, why="Slurm: None")),
        ("RUNNING|0|None", Observed(stage=Stage.RUNNING)),
        ("COMPLETING|0|None", Observed(stage=Stage.RUNNING)),
        ("COMPLETED|0|None", Observed(stage=Stage.ENDED, exit_code=0)),
        ("FAILED|768|NonZeroExitCode", Observed(stage=Stage.ENDED, exit_code=3)),
        ("FAILED|11|RaisedSignal:11", Observed(stage=Stage.ENDED, exit_code=-11)),
        ("NODE_FAIL|0|None", Observed(stage=Stage.ENDED, why="Slurm: NODE_FAIL")),
        ("CANCELLED|0|None", Observed(stage=Stage.ENDED, why="Slurm: CANCELLED")),
        ("PREEMPTED|19200|None", Observed(stage=Stage.ENDED, exit_code=75)),
        ("TIMEOUT|0|TimeLimit", Observed(stage=Stage.ENDED, why="Slurm: TIMEOUT (TimeLimit)")),
    ],
)
def test_a_line_of_squeue(row: str, shown: Observed) -> None:
    found = read_row("evenstep-r", f"evenstep-r+30|12|4|{row}|".split("|"))
    assert found == ("w34", "12_4", shown)


@pytest.mark.parametrize("name", ["evenstep-r2+0", "evenstep-r", "other", "x+evenstep-r"])
def test_other_jobs_are_none_of_the_run(name: str) -> None:
    assert read_row("evenstep-r", [name, "1", "0", "RUNNING", "0", "None"]) is None


StandIn = Callable[[str], SlurmLauncher]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A launcher whose commands are a script."""

    def make(script: str) -> SlurmLauncher:
        for program in ("sbatch", "squeue", "scancel"):
            path = tmp_path / program
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return SlurmLauncher(job(tmp_path))

    return make


@pytest.mark.parametrize(
    "told",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller",
        "sbatch: error: Socket timed out on send/recv operation",
        "sbatch: error: QOSMaxSubmitJobPerUserLimit",
        "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job "
        "submit limit, user's size and/or time limits)",
        "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying",
    ],
)
def test_what_passes_is_tried_again(stand_in: StandIn, told: str) -> None:
    with pytest.raises(OSError, match="sbatch: ") as raised:
        stand_in(f'echo "{told}" >&2; exit 1').start("cpux2", ["w0"])
    assert not isinstance(raised.value, LaunchRefusedError)


@pytest.mark.parametrize(
    "told",
    [
        "sbatch: error: invalid partition specified: none",
        "sbatch: error: Batch job submission failed: Invalid account or account/partition",
        "sbatch: unrecognized option '--none=1'",
    ],
)
def test_what_does_not_pass_is_refused(stand_in: StandIn, told: str) -> None:
    with pytest.raises(LaunchRefusedError) as raised:
        stand_in(f'echo "{told}" >&2; exit 1').start("cpux2", ["w0"])
    assert str(raised.value) == told


def test_a_command_that_hangs_is_ended_at_its_deadline(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DEADLINE_S", 0.2)
    with pytest.raises(TimeoutError, match=r"squeue did not answer within 0.2 s"):
        stand_in("exec sleep 600").observe()


def test_a_thousand_numbers_fit_an_array_and_more_make_another(
    stand_in: StandIn, tmp_path: Path
) -> None:
    launcher = stand_in(f'echo "$@" >>{tmp_path}/asked; cat >/dev/null; echo 1')
    launcher.start("cpux2", ["w5", "w1005", "w1006", "w3000"])
    asked = (tmp_path / "asked").read_text().splitlines()
    arrays = [[w for w in line.split() if "--array" in w or "--job-name" in w] for line in asked]
    assert arrays == [
        ["--job-name=evenstep-r-1+5", "--array=0,1000"],
        ["--job-name=evenstep-r-1+1006", "--array=0"],
        ["--job-name=evenstep-r-1+3000", "--array=0"],
    ]


@pytest.mark.parametrize("kind", ["cpu=2,array=3", "cpu=2,export=NONE", "cpu=2,Bad=1"])
def test_options_that_are_not_the_users_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match="--kind"):
        module.check_options(parse_kind(kind))


def test_without_slurm_the_command_says_where_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch is not on PATH: run this where jobs are"):
        SlurmLauncher(job(tmp_path))


def test_an_allocation_around_the_coordinator_is_not_passed_on() -> None:
    outer = {
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "1",
        "SBATCH_PARTITION": "x",
        "SLURM_CONF": "/etc/slurm.conf",
        "EVENSTEP_TOKEN": "secret",
        "HOME": "/root",
    }
    assert module._submit_environment(outer, {"A": "1"}) == {
        "SLURM_CONF": "/etc/slurm.conf",
        "HOME": "/root",
        "A": "1",
    }
