"""A live run under fault injection: query it, wait for conditions, compare its results."""

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
HELD = ["--epochs", "0"]  # train until `go()`
EPOCH_STEPS = 10  # with the default --samples and --batch
POLL_S = 0.02

Fault = tuple[str, str, int]


class LiveRun(ABC):
    """A run in `folder`, whose workers save their results in `out`.

    A `HELD` run trains until the test calls `go()`. Nothing here times out; pytest's timeout
    in pyproject.toml bounds the whole test.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.log = folder / "run", folder / "out", folder / "log"
        self.out.mkdir(exist_ok=True)
        (self.out / "go").unlink(missing_ok=True)  # left by the run that this one resumes
        self.log.touch()

    @abstractmethod
    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """Send an operator request; returns the coordinator's answer."""

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """The coordinator's view of the run; empty while there is no coordinator."""

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """The run's exit code; None while it is alive."""

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the status satisfies a condition."""
        while True:
            status = self.status()
            if "workers" in status and holds(status):  # a run that ends may answer with an error
                return status
            assert self.returncode is None, f"the run ended with {self.returncode}: {status}"
            time.sleep(POLL_S)

    def until_step(self, step: int) -> dict[str, Any]:
        """Wait until this step is committed."""
        return self.until(lambda status: status["step"] >= step)

    def until_training(self, num_workers: int, after: int = 0) -> dict[str, Any]:
        """Wait until this many workers train in a generation newer than `after`."""
        return self.until(
            lambda status: (
                status["state"] == "training"
                and status["generation"] > after
                and sum(w["rank"] is not None for w in status["workers"]) == num_workers
            )
        )

    def pids(self) -> dict[str, int]:
        """Pids of training workers, by name."""
        return {w["worker"]: w["pid"] for w in self.status()["workers"] if w["rank"] is not None}

    def signal(self, worker: str, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pids()[worker], number)

    def go(self) -> None:
        """Let a held run finish at the end of its current epoch."""
        (self.out / "go").touch()

    def finish(self) -> int:
        """Release the run and wait for it; returns its exit code."""
        self.go()
        return self.wait()

    def wait(self) -> int:
        """Wait for the run to end; returns its exit code."""
        while (code := self.returncode) is None:
            time.sleep(POLL_S)
        return code

    def output(self) -> str:
        """Everything printed by the run so far."""
        return self.log.read_text()

    def print_output_if(self, error: BaseException | None) -> None:
        """Print the run's output if the test failed."""
        if error is not None:
            sys.stdout.write(self.output())

    def results(self) -> dict[str, dict[str, Any]]:
        """Saved results of the workers that trained to the end, by name."""
        found = sorted(self.out.glob("*.pt"))
        return {p.stem: torch.load(p, weights_only=True) for p in found}

    @property
    def epochs(self) -> list[str]:
        """The `--epochs` option for a single process to train as long as this held run did."""
        (step,) = {result["step"] for result in self.results().values()}
        return epoch_args(step)


def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    while not holds():
        time.sleep(POLL_S)


def epoch_args(step: int) -> list[str]:
    """The `--epochs` option for a run that ends at this step."""
    return ["--epochs", str(step // EPOCH_STEPS)]


def same(result: dict[str, Any], alone: dict[str, Any], tolerance: float = 1e-8) -> bool:
    """Assert that a run matches the reference: parameters, buffers, learning rate and steps."""
    error = max(
        float((result["model"][name].double() - tensor.double()).abs().max())
        for name, tensor in alone["model"].items()
    )
    message = f"max difference {error:.2g}, step {result['step']} of {alone['step']}"
    assert error <= tolerance, message
    assert (result["step"], result["lr"]) == (alone["step"], alone["lr"]), message
    return True
