"""What tests see of a run under faults, and what they wait for."""

from __future__ import annotations

import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SCRIPT = Path(__file__).with_name("train.py")
HELD = ["--epochs", "0"]
EPOCH_STEPS = 10  # unless told otherwise
LOOK_S = 0.02

Fault = tuple[str, str, int]


class Watching(ABC):
    """A run in `folder`, whose workers leave their results in `out`.

    One that is `HELD` trains for as long as the test needs to see what it wants, and ends at `go`.
    Nothing here has a bound in time: that of the whole test is in pyproject.toml.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.log = folder / "run", folder / "out", folder / "log"
        self.out.mkdir(exist_ok=True)
        (self.out / "go").unlink(missing_ok=True)  # from the run that this one goes on with
        self.log.touch()

    @abstractmethod
    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """What the coordinator answers."""

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """The run as its coordinator sees it; empty while there is none."""

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """The exit code of `evenstep run`; None: it goes on."""

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for the status to be as it should."""
        while True:
            status = self.status()
            if status and holds(status):
                return status
            assert self.returncode is None, f"the run ended with {self.returncode}: {status}"
            time.sleep(LOOK_S)

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
        while (code := self.returncode) is None:
            time.sleep(LOOK_S)
        return code

    def said(self) -> str:
        """All that was printed."""
        return self.log.read_text()

    def show_if(self, error: BaseException | None) -> None:
        """Show what was printed along with a failure."""
        if error is not None:
            sys.stdout.write(self.said())

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
    """Wait for something to be so."""
    while not holds():
        time.sleep(LOOK_S)


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
