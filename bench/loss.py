"""A worker is killed in the midst of training and another joins: the demo's second part."""

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
from evenstep.coordinate.ask import NoAnswerError
from evenstep.journal import read
from evenstep.types import Joined, Lost, StepDone

SCRIPT = Path(__file__).parents[1] / "examples" / "fashion_mnist.py"
EVENSTEP = Path(sys.executable).with_name("evenstep")
BOUND_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What happened: idle seconds of each change, and the last lines of both runs."""

    lost_s: float
    joined_s: float | None  # None: the other came too late
    alone: str
    elastic: str

    @property
    def alone_loss(self) -> float:
        """Of the run alone."""
        return float(self.alone.split()[3])

    @property
    def elastic_loss(self) -> float:
        """Of the run that lost a worker."""
        return float(self.elastic.split()[3])


def killed_and_joined(args: list[str], kill_at: int) -> Story:
    """Train alone, then on three workers of which one is killed at a step and replaced."""
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
            said, _ = run.communicate(timeout=BOUND_S)
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGINT)
                run.wait(BOUND_S)
        lost_s, joined_s = _idle_s(folder / "journal.jsonl")
    return Story(lost_s=lost_s, joined_s=joined_s, alone=_last(alone), elastic=_last(said))


def _pid_at(folder: Path, step: int) -> int:
    """The process of rank 1, once a step was taken."""
    until_s = time.monotonic() + BOUND_S
    while time.monotonic() < until_s:
        try:
            status = ask_run(folder, "status")
        except (NoAnswerError, OSError):
            status = {"step": -1}
        if status["step"] >= step:
            return next(int(w["pid"]) for w in status["workers"] if w["rank"] == 1)
        time.sleep(0.05)
    raise SystemExit("the run did not come to train; try `evenstep run` by hand")


def _idle_s(journal: Path) -> tuple[float, float | None]:
    """From each change to the end of the first step after it, less that step itself."""
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


def _last(said: str) -> str:
    """The last epoch's line, without the worker's name before it."""
    return str(re.findall(r"epoch \d+ .*", said)[-1]).strip()
