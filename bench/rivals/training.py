"""The model, data and arguments that all systems share, and the log of committed steps."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

LARGE = 4096  # six layers of this width squared: 100 million parameters


def network(name: str) -> nn.Module:
    """A small CNN, or a model with a hundred million parameters."""
    if name == "large":
        return nn.Sequential(nn.Flatten(), *(nn.Linear(LARGE, LARGE) for _ in range(6)))
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1152, 10),
    )


def samples(name: str, num: int = 2400) -> TensorDataset:
    """Random images and labels."""
    rng = torch.Generator().manual_seed(1)
    side, classes, num = (64, LARGE, 240) if name == "large" else (28, 10, num)
    x = torch.randn(num, 1, side, side, generator=rng)
    return TensorDataset(x, torch.randint(classes, (num,), generator=rng))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose state is as large as the parameters."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


class StepLog:
    """Writes a line per committed step (time, step, world size), and the times of void ones."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{os.getpid()}.steps").open("a", buffering=1)
        self._voids = folder / f"{os.getpid()}.voids"

    def step(self, step: int, world: int) -> None:
        """Log a committed step."""
        print(time.monotonic(), step, world, file=self._file)

    def void(self, computed_s: float) -> None:
        """Log a void step whose compute ended at `computed_s`."""
        with self._voids.open("a") as file:
            print(computed_s, file=file)


def parse_arguments() -> argparse.Namespace:
    """The options that `bench.transitions` and `bench.scaling` pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("cnn", "large"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=60, help="global")
    parser.add_argument("--samples", type=int, default=2400, help="of the small model's data")
    parser.add_argument("--epochs", type=int, default=1_000_000)
    parser.add_argument("--graceful", action="store_true", help="on SIGTERM: checkpoint and exit")
    parser.add_argument("--pause", type=float, default=0.03, help="seconds of idle CPU per step")
    parser.add_argument("--cores", type=float, default=0.0, help="CPU quota; 0: none")
    parser.add_argument("--per-sample", type=float, default=0.0, help="emulated seconds")
    parser.add_argument("--slow", default="", help="id of the slow worker")
    parser.add_argument("--factor", type=float, default=1.0, help="its relative speed")
    parser.add_argument("--from-step", type=int, default=0, help="step from which it is slow")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return args
