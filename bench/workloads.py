"""The workloads of the benchmarks: the examples' networks, on data in memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from char_transformer import Writer
from cifar_resnet import resnet
from fashion_mnist import network
from image_data import fashion_mnist, random_images

ORIGIN = fashion_mnist(None, train=True, limit=1)[1]  # of the images
cross_entropy = nn.functional.cross_entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A network, samples for it, and the mean loss of a batch."""

    model: nn.Module
    data: TensorDataset
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cross_entropy
    lr: float = 0.05


def mlp(num: int) -> Workload:
    """Small: reduction and overhead dominate the step."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return Workload(model=model, data=random_images(num, (1, 8, 8), seed=1))


def cnn(num: int) -> Workload:
    """The network of examples/fashion_mnist.py."""
    data, _ = fashion_mnist(None, train=True, limit=num)
    return Workload(model=network(), data=data)


def cnn_double(num: int) -> Workload:
    """The same in double precision, in which two runs can be compared after many steps."""
    work = cnn(num)
    images, labels = work.data.tensors
    return Workload(model=work.model.double(), data=TensorDataset(images.double(), labels))


def residual(num: int) -> Workload:
    """ResNet-20 of examples/cifar_resnet.py, with local batch statistics."""
    return Workload(model=resnet(20), data=random_images(num, (3, 32, 32), seed=1))


def transformer(num: int) -> Workload:
    """A wider network of examples/char_transformer.py, on lines of 64 characters."""
    rng = torch.Generator().manual_seed(1)
    text = torch.randint(64, (num, 65), generator=rng)

    def loss(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return cross_entropy(scores.flatten(0, 1), wanted.flatten())

    data = TensorDataset(text[:, :-1].clone(), text[:, 1:].clone())
    return Workload(model=Writer(64, 64, width=128), data=data, loss=loss)


class Pause(nn.Module):
    """Identity whose backward pass sleeps, so that the CPU is free, as with a GPU."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`; its backward pass sleeps."""
        if x.requires_grad:
            x.register_hook(lambda _: time.sleep(self.seconds))
        return x


def wide(num: int, pause_s: float = 0.0) -> Workload:
    """Ten layers of a million parameters each and little compute, for memory and overlap."""
    layers = (part for _ in range(10) for part in (nn.Linear(1024, 1024), Pause(pause_s)))
    return Workload(
        model=nn.Sequential(nn.Flatten(), *layers),
        data=random_images(num, (1, 32, 32), seed=1),
        lr=1e-4,
    )


def slow(num: int) -> Workload:
    """`wide`, with ten pauses of 10 ms in its backward pass."""
    return wide(num, pause_s=0.01)


WORKLOADS: dict[str, Callable[[int], Workload]] = {
    "mlp": mlp,
    "cnn": cnn,
    "cnn-double": cnn_double,
    "resnet": residual,
    "transformer": transformer,
    "wide": wide,
    "slow": slow,
}
