"""A real run to do harm to: `evenstep run`, with workers that can be killed and stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch

from evenstep.coordinate.ask import NoAnswerError, ask
from evenstep.messages import Ask

SCRIPT = Path(__file__).with_name("train.py")
EVENSTEP = Path(sys.executable).with_name("evenstep")
BOUND_S = 90.0
HELD = ["--epochs", "0"]
EPOCH_STEPS = 10  # unless told otherwise
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "OMP_NUM_THREADS": "1",
    "HELD_BY": str(os.getpid()),
}

Fault = tuple[str, str, int]


class Running:
    """A run of `train.py`. Ended, with all its workers, when the context is left.

    One that is `HELD` trains for as long as the test needs to see what it wants, and ends at `go`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        workers: str = "5",
        options: Sequence[str] = (),
        args: Sequence[str] = (),
        faults: Sequence[Fault] = (),
        bound_s: float = BOUND_S,
        script: Path = SCRIPT,
    ) -> None:
        self._bound_s = bound_s
        self.folder, self.out = folder / "run", folder / "out"
        self.out.mkdir(exist_ok=True)
        (self.out / "go").unlink(missing_ok=True)  # from the run that this one goes on with
        where = ["--resume" if self.folder.exists() else "--run", str(self.folder)]
        self._log = (folder / "log").open("a+")
        command = [str(script), "--out", str(self.out), *args]
        self.process = subprocess.Popen(
            [EVENSTEP, "run", "--workers", workers, *where, *options, *command],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**ENVIRONMENT, "FAULTS": json.dumps(faults)},
        )

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._end_workers()
        if error is not None:
            sys.stdout.write(self.said())  # shown with the failure
        self._log.close()

    def _end_workers(self) -> None:
        """Workers outlive a coordinator that was killed, but not a test."""
        for file in self.folder.glob("logs/*.pid"):
            pid, made_s = file.read_text().split()
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(pid))
                if process.create_time() == float(made_s):
                    process.kill()

    def until_gone(self, pid: int) -> None:
        """Wait for a process that is not ours to reap."""
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(self._bound_s)

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """What the coordinator answers."""
        host, _, port = (self.folder / "address").read_text().strip().rpartition(":")
        token = (self.folder / "token").read_text().strip()
        return ask(host, int(port), token, Ask(proof="", what=what, **more))

    def status(self) -> dict[str, Any]:
        """The run as its coordinator sees it; empty while there is none."""
        try:
            return self.ask("status")
        except (NoAnswerError, FileNotFoundError, ValueError):
            return {}

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for the status to be as it should, or for the bound."""
        until_s = time.monotonic() + self._bound_s
        while time.monotonic() < until_s:
            status = self.status()
            if status and holds(status):
                return status
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended with {self.process.returncode}")
            time.sleep(0.05)
        raise AssertionError(f"not within {self._bound_s} s: {self.status()}")

    def until_step(self, step: int) -> dict[str, Any]:
        """Wait until a step was taken."""
        return self.until(lambda status: status["step"] >= step)

    def until_training(self, num_workers: int, after: int = 0) -> dict[str, Any]:
        """Wait until so many workers train, in a generation after a given one."""
        return self.until(
            lambda status: (
                status["state"] == "training"
                and status["generation"] > after
                and sum(w["rank"] is not None for w in status["workers"]) == num_workers
            )
        )

    def pids(self) -> dict[str, int]:
        """The processes of the workers that train, by name."""
        return {w["worker"]: w["pid"] for w in self.status()["workers"] if w["rank"] is not None}

    def signal(self, worker: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a worker a signal."""
        os.kill(self.pids()[worker], number)

    def go(self) -> None:
        """Let a held run end with its epoch."""
        (self.out / "go").touch()

    def finish(self) -> int:
        """Let the run come to its end; its exit code."""
        self.go()
        return self.wait()

    def wait(self) -> int:
        """Wait for the end of a run that was asked to stop; its exit code."""
        return self.process.wait(self._bound_s)

    def said(self) -> str:
        """All that was printed."""
        return Path(self._log.name).read_text()

    def results(self) -> dict[str, dict[str, Any]]:
        """What the workers that trained to the end left behind, by name."""
        found = sorted(self.out.glob("*.pt"))
        return {p.stem: torch.load(p, weights_only=True) for p in found}

    @property
    def length(self) -> list[str]:
        """How long a held run was, for one process to train as long: its last `--epochs` counts."""
        (step,) = {result["step"] for result in self.results().values()}
        return epochs(step)


def until(holds: Callable[[], bool]) -> None:
    """Wait for something to be so, within the bound."""
    until_s = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < until_s, "too late"
        time.sleep(0.05)


def epochs(step: int) -> list[str]:
    """As arguments, the epochs that end with a step."""
    return ["--epochs", str(step // EPOCH_STEPS)]


def same(result: dict[str, Any], alone: dict[str, Any], tolerance: float = 1e-8) -> bool:
    """Whether two runs ended alike: parameters, buffers, learning rate and steps."""
    apart = max(
        float((result["model"][name].double() - tensor.double()).abs().max())
        for name, tensor in alone["model"].items()
    )
    told = f"{apart:.2g} apart, step {result['step']} of {alone['step']}"
    assert apart <= tolerance, told
    assert (result["step"], result["lr"]) == (alone["step"], alone["lr"]), told
    return True
