"""The second part of the demo: a worker is killed during training and another joins."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.jobs import ask_run
from evenstep.coordinate.client import NoAnswerError
from evenstep.journal import read
from evenstep.types import Joined, Lost, StepDone

SCRIPT = Path(__file__).parents[1] / "examples" / "fashion_mnist.py"
EVENSTEP = Path(sys.executable).with_name("evenstep")
BOUND_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Idle seconds of each change, and the last lines of both runs."""

    lost_s: float
    joined_s: float | None  # None: the replacement came too late
    alone: str
    elastic: str

    @property
    def alone_loss(self) -> float:
        """Loss of the run alone."""
        return float(self.alone.split()[3])

    @property
    def elastic_loss(self) -> float:
        """Loss of the run that lost a worker."""
        return float(self.elastic.split()[3])


def killed_and_joined(args: list[str], kill_at: int) -> Outcome:
    """Train alone, then on three workers, one of which is killed at a step and replaced."""
    alone = subprocess.run(
        [sys.executable, str(SCRIPT), *args],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=BOUND_S,
    ).stdout
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        command = [str(EVENSTEP), "run", "--workers", "3", "--restarts", "1", "--run", str(folder)]
        run = subprocess.Popen(
            [*command, str(SCRIPT), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            os.kill(_pid_at(folder, kill_at), signal.SIGKILL)
            output, _ = run.communicate(timeout=BOUND_S)
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGINT)
                run.wait(BOUND_S)
        lost_s, joined_s = _idle_s(folder / "journal.jsonl")
    return Outcome(
        lost_s=lost_s, joined_s=joined_s, alone=_last_epoch(alone), elastic=_last_epoch(output)
    )


def _pid_at(folder: Path, step: int) -> int:
    """The pid of rank 1, once the run has reached a step."""
    deadline_s = time.monotonic() + BOUND_S
    while time.monotonic() < deadline_s:
        try:
            status = ask_run(folder, "status")
        except (NoAnswerError, OSError):
            status = {"step": -1}
        if status["step"] >= step:
            return next(int(w["pid"]) for w in status["workers"] if w["rank"] == 1)
        time.sleep(0.05)
    raise SystemExit("the run did not train in time; try `evenstep run` by hand")


def _idle_s(journal: Path) -> tuple[float, float | None]:
    """Time from each change to the start of the first step after it."""
    idle: dict[type, float] = {}
    waiting: tuple[type, float] | None = None
    for record in read(journal)[1]:
        if isinstance(record.event, Lost) or (isinstance(record.event, Joined) and Lost in idle):
            waiting = (type(record.event), record.at_s)
        elif isinstance(record.event, StepDone) and waiting is not None:
            kind, since_s = waiting
            idle[kind] = max(0.0, record.at_s - since_s - record.event.seconds)
            waiting = None
    return idle.get(Lost, 0.0), idle.get(Joined)


def _last_epoch(output: str) -> str:
    """The line of the last epoch, without the worker's name."""
    return str(re.findall(r"epoch \d+ .*", output)[-1]).strip()
