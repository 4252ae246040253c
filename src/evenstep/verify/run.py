"""A user's own script, run for a few steps alone and on uneven workers, and the two compared.

The script runs as it is, in processes of its own; nothing here imports torch.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path

import msgspec

from evenstep.errors import EvenstepError
from evenstep.verify.compare import (
    Finding,
    Gap,
    gap,
    judge_data,
    judge_gradients,
    judge_parameters,
)
from evenstep.verify.records import (
    AGAIN,
    ALONE,
    TOGETHER,
    VARIABLE,
    Record,
    Task,
    load_gradients,
    load_records,
)

GRACE_S = 15.0  # for the others to end by themselves when one has failed
TAIL = 30  # lines of a failed script's output that are shown


class ScriptFailedError(EvenstepError, RuntimeError):
    """The script ended with an error of its own."""

    def __init__(self, who: str, code: int, output: str) -> None:
        super().__init__(who, code, output)
        self.who, self.code, self.output = who, code, output

    def __str__(self) -> str:
        return f"the script ended with code {self.code} {self.who}; its last words:\n{self.output}"


class Script:
    """Runs a script as `python script args`, one process a rank, as torchrun would."""

    def __init__(self, script: Path, args: Sequence[str]) -> None:
        self._command = [sys.executable, str(script), *args]

    def __call__(self, task: Task, world: int) -> None:
        """One run to its end. A rank that fails ends all."""
        port, logs = _free_port(), [task.path(f"{rank}.log") for rank in range(world)]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                place = _environment(task, rank, world, port)
                with log.open("wb") as out:
                    started.append(
                        subprocess.Popen(self._command, env=place, stdout=out, stderr=out)
                    )
            failed = _first_to_fail(started)
        finally:
            for process in started:
                process.kill()
                process.wait()
        if failed is not None:
            where = "alone" if world == 1 else f"as worker {failed} of {world}"
            tail = logs[failed].read_text(errors="replace").splitlines()[-TAIL:]
            raise ScriptFailedError(where, started[failed].returncode, "\n".join(tail))


def verify(
    run: Callable[[Task, int], None], *, num_steps: int, shares: Sequence[int]
) -> Iterator[Finding]:
    """What agrees between a run alone and one on several workers, uneven by `shares`."""
    with tempfile.TemporaryDirectory(prefix="evenstep-verify-") as folder:
        task = Task(folder=folder, run=ALONE, num_steps=num_steps, shares=tuple(shares))
        several = msgspec.structs.replace(task, run=TOGETHER)
        run(task, 1)
        run(several, len(shares))
        (alone,), together = load_records(task, 1), load_records(several, len(shares))
        data = judge_data(alone, together)
        yield data
        if not data.agree:
            return  # other data make other gradients: there is nothing to learn from them
        gaps = _gaps(task, several, alone)
        gradients = judge_gradients(alone, together, gaps)
        if not gradients.agree:
            # Is it the workers, or would the script not do the same twice even alone?
            again = msgspec.structs.replace(task, run=AGAIN)
            run(again, 1)
            gradients = judge_gradients(alone, together, gaps, _gaps(task, again, alone))
        yield gradients
        yield judge_parameters(together)


def _gaps(task: Task, other: Task, alone: Record) -> list[Gap]:
    steps = range(len(alone.steps))
    return [gap(load_gradients(task, step), load_gradients(other, step)) for step in steps]


def _first_to_fail(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all have ended, or one has failed and the others had time to end by themselves."""
    failed, deadline = None, inf
    while failed is None or time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if failed is None:
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            deadline = time.monotonic() + GRACE_S
        if None not in codes:
            break
        time.sleep(0.05)
    return failed


def _environment(task: Task, rank: int, world: int, port: int) -> dict[str, str]:
    """As torchrun would set it for a rank; alone, as without torchrun."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in names and not key.startswith("TORCHELASTIC_")
    }
    clean[VARIABLE] = msgspec.json.encode(task).decode()
    if world == 1:
        return clean
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world))}
    values = (rank, world, rank, world, "127.0.0.1", port)
    return threads | clean | dict(zip(names, map(str, values), strict=True))


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
