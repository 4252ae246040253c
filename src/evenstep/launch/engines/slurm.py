"""Workers as Slurm job arrays: sbatch asks for them, squeue shows them, scancel ends them.

One array a request; a worker's number is the number in the job's name plus its index, so a later
coordinator knows the workers of an earlier one from squeue alone. The batch script becomes the
worker, so Slurm's signals reach it: `--signal`, preemption and time limits are leaves. Jobs are not
requeued: evenstep asks for another worker instead.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from evenstep.errors import ConfigError
from evenstep.ports import EngineJob, LaunchRefusedError, Observed, Stage, WorkerKind
from evenstep.types import WorkerId

DEADLINE_S = 60.0  # of one command
MAX_ARRAY = 1000  # the highest index, unless the cluster's MaxArraySize was raised
LEAVE_S = 60  # before the end of its time limit a worker is asked to leave
TEMPFAIL = os.EX_TEMPFAIL

COLUMNS = ("Name", "ArrayJobID", "ArrayTaskID", "State", "exit_code", "Reason")
OWN = ("array", "export", "job-name", "open-mode", "output", "parsable", "wrap")
"""Options of sbatch that are not the user's to set."""

PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"}
ENDED_BY_SLURM = {
    "BOOT_FAIL",
    "CANCELLED",
    "DEADLINE",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
ENDED = {"COMPLETED", "FAILED", *ENDED_BY_SLURM}

PASSING = re.compile(
    r"unable to contact|socket timed out|not responding|connection (refused|reset)|zero bytes"
    r"|temporarily|try again|communication|submit limit|maxsubmit|job limit",
    re.IGNORECASE,
)
"""What sbatch says if it may accept the same request later."""


class SlurmLauncher:
    """The workers of one run, of the user who runs it. Its only memory is Slurm's own."""

    def __init__(self, job: EngineJob) -> None:
        for program in ("sbatch", "squeue", "scancel"):
            if shutil.which(program) is None:
                raise ConfigError(
                    "--on slurm",
                    f"{program} is not on PATH: run this where jobs are submitted, such as a login "
                    "node",
                )
        if unknown := job.options.keys() - {"partition"}:
            problem = f"--{min(unknown)} is not for slurm; give options of sbatch in --kind"
            raise ConfigError("--on slurm", problem)
        for kind in job.kinds.values():
            check_options(kind)
        self._job = job
        self._name = f"evenstep-{job.run}"
        self._env = _submit_environment(os.environ, job.env)

    def start(self, kind: str, workers: Sequence[WorkerId]) -> None:
        """One array for each thousand numbers."""
        numbers = sorted(int(worker.removeprefix("w")) for worker in workers)
        while numbers:
            first = numbers[0]
            batch = [n for n in numbers if n - first <= MAX_ARRAY]
            numbers = numbers[len(batch) :]
            command = submit_command(self._name, first, batch, self._job, self._job.kinds[kind])
            script = batch_script(first, self._job.folder / "logs", self._job.command)
            env = {**self._env, **self._job.kinds[kind].variables()}
            done = _run(command, script, env)
            if done.returncode:
                told = _told(done)
                if PASSING.search(told):
                    raise OSError(told)
                raise LaunchRefusedError(told)

    def stop(self, workers: Sequence[WorkerId]) -> None:
        """Slurm sends SIGTERM, and SIGKILL after its KillWait."""
        jobs = [job for worker, job, _ in self._shown() if worker in workers]
        if jobs:
            done = _run(["scancel", *jobs], "", self._env)
            if done.returncode:
                raise OSError(_told(done))

    def observe(self) -> Mapping[WorkerId, Observed]:
        """squeue shows a job for MinJobAge, five minutes by default, after its end."""
        shown: dict[WorkerId, Observed] = {}
        for worker, _, observed in self._shown():
            # A submission whose answer was lost may have been repeated: the living job counts.
            if worker not in shown or shown[worker].stage is Stage.ENDED:
                shown[worker] = observed
        return shown

    def close(self) -> None:
        """Nothing is held open."""

    def _shown(self) -> list[tuple[WorkerId, str, Observed]]:
        """Workers with their array job and index, and what squeue shows of them."""
        columns = ",".join(f"{column}:|" for column in COLUMNS)
        command = ["squeue", "--me", "--noheader", "--array", "--states=all", "-O", columns]
        done = _run(command, "", self._env)
        if done.returncode:
            raise OSError(_told(done))
        rows = (line.split("|") for line in done.stdout.splitlines())
        return [found for row in rows if (found := read_row(self._name, row)) is not None]


def check_options(kind: WorkerKind) -> None:
    """Options of a kind are sbatch's long options, such as constraint=ib."""
    for key in kind.options:
        if not re.fullmatch(r"[a-z][a-z-]*", key):
            raise ConfigError("--kind", f'"{key}" is no option of sbatch, such as constraint')
        if key in OWN:
            raise ConfigError("--kind", f"--{key} is set by evenstep")


def submit_command(
    name: str, first: int, numbers: Sequence[int], job: EngineJob, kind: WorkerKind
) -> list[str]:
    """The sbatch command for the workers of these numbers."""
    resources: dict[str, str] = {}
    if kind.cpus:
        resources["cpus-per-task"] = str(kind.cpus)
    if kind.gpus:
        resources["gres"] = ":".join(filter(None, ("gpu", kind.gpu_type, str(kind.gpus))))
    if kind.memory_bytes:
        resources["mem"] = f"{-(-kind.memory_bytes // 2**20)}M"
    options = {
        "job-name": f"{name}+{first}",
        "array": ",".join(str(n - first) for n in numbers),
        "export": "ALL",
        "ntasks": "1",
        "signal": f"B:TERM@{LEAVE_S}",
        **resources,
        **job.options,
        **kind.options,
    }
    flags = [f"--{key}={value}" for key, value in options.items()]
    return ["sbatch", "--parsable", "--no-requeue", "--output=/dev/null", *flags]


def batch_script(first: int, logs: Path, command: Sequence[str]) -> str:
    """Becomes the worker. Exit code 73: its host does not have the run's folder."""
    folder = shlex.quote(str(logs))
    worker = shlex.join([sys.executable, "-m", "evenstep.launch.worker", *command])
    return (
        "#!/bin/sh\n"
        f"export EVENSTEP_WORKER=w$(({first} + SLURM_ARRAY_TASK_ID))\n"
        f"[ -w {folder} ] || exit {os.EX_CANTCREAT}\n"
        f'exec {worker} >>{folder}/"$EVENSTEP_WORKER".log 2>&1\n'
    )


def read_row(name: str, row: Sequence[str]) -> tuple[WorkerId, str, Observed] | None:
    """A line of squeue; None: a job of something else."""
    if len(row) < len(COLUMNS):
        return None
    job_name, array, index, state, status, reason = (field.strip() for field in row[:6])
    own, _, first = job_name.rpartition("+")
    if own != name or not (first.isdecimal() and index.isdecimal()):
        return None
    worker = f"w{int(first) + int(index)}"
    return worker, f"{array}_{index}", _observed(state, status, reason)


def _observed(state: str, status: str, reason: str) -> Observed:
    if state in PENDING:
        return Observed(stage=Stage.PENDING, why=f"Slurm: {reason or state}")
    if state not in ENDED:
        return Observed(stage=Stage.RUNNING)
    code = os.waitstatus_to_exitcode(int(status)) if status.isdecimal() else 0
    if state in ENDED_BY_SLURM and code != TEMPFAIL:  # else it has left in order
        why = "" if reason in ("", "None") else f" ({reason})"
        return Observed(stage=Stage.ENDED, why=f"Slurm: {state}{why}")
    return Observed(stage=Stage.ENDED, exit_code=code)


def _submit_environment(outer: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """For sbatch, which passes it on to workers.

    Variables of an allocation that the coordinator runs in would be taken for options.
    """
    kept = {
        name: value
        for name, value in outer.items()
        if name != "EVENSTEP_TOKEN"
        if not name.startswith(("SLURM_", "SBATCH_")) or name == "SLURM_CONF"
    }
    return {**kept, **own}


def _run(
    command: Sequence[str], text: str, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            input=text,
            env=dict(env),
            text=True,
            errors="replace",
            capture_output=True,
            timeout=DEADLINE_S,
            start_new_session=True,  # Ctrl-C is for the coordinator
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[0]} did not answer within {DEADLINE_S:g} s") from None


def _told(done: subprocess.CompletedProcess[str]) -> str:
    """What a failed command said, on one line."""
    said = " ".join((done.stderr or done.stdout).split())
    code = done.returncode
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return said or f"{done.args[0]} ended with {how} and said nothing"
