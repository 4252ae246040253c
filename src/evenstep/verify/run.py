"""Run a user's script for a few steps, in one process and on uneven workers, and compare the runs.

The script runs unchanged, in processes of its own.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec

from evenstep.errors import EvenstepError
from evenstep.launch.environment import torchrun_variables
from evenstep.launch.ranks import without_rank
from evenstep.verify.compare import (
    Finding,
    GradientGap,
    compare_data,
    compare_gradients,
    compare_parameters,
    gradient_gap,
)
from evenstep.verify.process import start_script
from evenstep.verify.records import (
    DISTRIBUTED,
    ENV_VARIABLE,
    REFERENCE,
    RESEEDED,
    VerifiedRun,
    load_gradients,
    load_records,
)

GRACE_S = 15.0  # for the other ranks to exit by themselves when one has failed
MAX_LINES = 30  # of a failed script's output in the error message


class ScriptFailedError(EvenstepError, RuntimeError):
    """The script exited with an error of its own."""

    def __init__(self, where: str, code: int, output: str) -> None:
        super().__init__(where, code, output)
        self.where, self.code, self.output = where, code, output

    def __str__(self) -> str:
        return (
            f"the script exited with code {self.code} {self.where}; its last lines:\n{self.output}"
        )


class Script:
    """Runs a script as `python script args`, one process per rank, as torchrun would."""

    def __init__(self, script: Path, args: Sequence[str]) -> None:
        self._script, self._args = script, args

    def __call__(self, run: VerifiedRun, world: int) -> None:
        """Run to the end. If a rank fails, all are killed."""
        logs = [run.path(f"{rank}.log") for rank in range(world)]
        shared = torchrun_variables(world)
        # One run in a process that shares nothing with the others: what depends on the hashes of
        # strings, such as the order of a set, differs between real workers too.
        fork = run.name != REFERENCE
        processes: list[BaseProcess] = []
        try:
            for rank, log in enumerate(logs):
                env = _environment(run, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                processes.append(start_script(self._script, self._args, env, log, fork=fork))
            failed = _first_to_fail(processes)
        finally:
            for process in processes:
                process.kill()
                process.join()
        if failed is not None:
            where = "alone" if world == 1 else f"as worker {failed} of {world}"
            tail = logs[failed].read_text(errors="replace").splitlines()[-MAX_LINES:]
            code = processes[failed].exitcode
            assert code is not None
            raise ScriptFailedError(where, code, "\n".join(tail))


def verify(
    script: Callable[[VerifiedRun, int], None], *, num_steps: int, shares: Sequence[int]
) -> Iterator[Finding]:
    """Compare a single-process run with one on several workers, with the given shares."""
    with tempfile.TemporaryDirectory(prefix="evenstep-verify-") as folder:
        reference_run = VerifiedRun(
            folder=folder, name=REFERENCE, num_steps=num_steps, shares=tuple(shares)
        )
        distributed_run = reference_run.named(DISTRIBUTED)
        script(reference_run, 1)
        script(distributed_run, len(shares))
        (reference,) = load_records(reference_run, 1)
        distributed = load_records(distributed_run, len(shares))
        data = compare_data(reference, distributed)
        yield data
        if not data.agrees:
            return  # gradients of different data differ anyway
        steps = range(len(reference.steps))
        gaps = _gaps(reference_run, distributed_run, steps)
        gradients = compare_gradients(reference, distributed, gaps)
        if not gradients.agrees:
            # Does it differ because of the workers, or between any two runs?
            reseeded_run = reference_run.named(RESEEDED)
            script(reseeded_run, 1)
            reseeded_gaps = _gaps(reference_run, reseeded_run, steps)
            gradients = compare_gradients(reference, distributed, gaps, reseeded_gaps)
        yield gradients
        yield compare_parameters(distributed)


def _gaps(reference: VerifiedRun, other: VerifiedRun, steps: range) -> list[GradientGap]:
    pairs = ((load_gradients(reference, step), load_gradients(other, step)) for step in steps)
    return [gradient_gap(ours, theirs) for ours, theirs in pairs]


def _first_to_fail(processes: Sequence[BaseProcess]) -> int | None:
    """Wait until all have exited, or one has failed and the others had time to exit."""
    failed, deadline_s = None, inf
    while failed is None or time.monotonic() < deadline_s:
        codes = [process.exitcode for process in processes]
        if failed is None:
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            deadline_s = time.monotonic() + GRACE_S
        if None not in codes:
            break
        time.sleep(0.05)
    return failed


def _environment(run: VerifiedRun, torchrun: Mapping[str, str]) -> dict[str, str]:
    """The environment of one rank; a single process gets nothing of torchrun's or others'."""
    clean = {
        key: value
        for key, value in without_rank(os.environ).items()
        if key not in torchrun and not key.startswith("TORCHELASTIC_")
    }
    clean[ENV_VARIABLE] = msgspec.json.encode(run).decode()
    world = int(torchrun["WORLD_SIZE"])
    if world == 1:
        return clean
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world)), **clean, **torchrun}
