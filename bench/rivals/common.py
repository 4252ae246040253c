"""What all of them train, and how they tell of each committed step."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

LARGE = 4096  # squared, times six layers: 100 million parameters


def network(name: str) -> nn.Module:
    """A small CNN, or a hundred million parameters."""
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
    """Images and labels, made up."""
    chance = torch.Generator().manual_seed(1)
    side, classes, num = (64, LARGE, 240) if name == "large" else (28, 10, num)
    x = torch.randn(num, 1, side, side, generator=chance)
    return TensorDataset(x, torch.randint(classes, (num,), generator=chance))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With a state as large as the parameters."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


class Told:
    """One line for every committed step: when, which, of how many workers. And void ones."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{os.getpid()}.steps").open("a", buffering=1)
        self._voids = folder / f"{os.getpid()}.voids"

    def step(self, step: int, world: int) -> None:
        """A step is committed."""
        print(time.monotonic(), step, world, file=self._file)

    def void(self, computed_s: float) -> None:
        """A step is void, whose compute was over then."""
        with self._voids.open("a") as file:
            print(computed_s, file=file)


def arguments() -> argparse.Namespace:
    """What `bench.transitions` and `bench.scaling` ask for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("cnn", "large"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=60, help="of all workers")
    parser.add_argument("--samples", type=int, default=2400, help="of the small one's data")
    parser.add_argument("--epochs", type=int, default=1_000_000)
    parser.add_argument("--graceful", action="store_true", help="SIGTERM: a checkpoint, and out")
    parser.add_argument("--pause", type=float, default=0.03, help="of every step: the CPU is free")
    parser.add_argument("--cores", type=float, default=0.0, help="a quota, once it trains; 0: none")
    parser.add_argument("--per-sample", type=float, default=0.0, help="seconds of an own device")
    parser.add_argument("--slow", default="", help="a worker whose device is slower")
    parser.add_argument("--factor", type=float, default=1.0, help="of its speed that it has")
    parser.add_argument("--from-step", type=int, default=0, help="that it is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return args
