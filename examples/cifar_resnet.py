"""A residual network on CIFAR-10, or on generated images of the same shape.

    python examples/cifar_resnet.py
    torchrun --nproc-per-node=3 examples/cifar_resnet.py --depth 20 --epochs 90 --data DIR

--data is the folder of CIFAR-10's binary version: data_batch_1.bin to 5, test_batch.bin.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from image_data import cifar10
from torch import nn
from torch.utils.data import TensorDataset

import evenstep


class Block(nn.Module):
    """Two convolutions and a shortcut, which subsamples and zero-pads new channels."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.stride, self.more = stride, after - before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output, with `after` channels."""
        out = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        short = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (*(0,) * 5, self.more))
        sum_: torch.Tensor = (out + short).relu()
        return sum_


def resnet(depth: int) -> nn.Sequential:
    """ResNet-20 for depth 20: three stages of (depth - 2) / 6 blocks."""
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"depth must be 6 n + 2, such as 8, 14 or 20: got {depth}")
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    layers += [nn.BatchNorm2d(16), nn.ReLU()]
    before = 16
    for after in (16, 32, 64):
        for i in range((depth - 2) // 6):
            layers.append(Block(before, after, 2 if i == 0 and after > 16 else 1))
            before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


@torch.no_grad()
def evaluate(
    session: evenstep.Session, model: nn.Module, data: TensorDataset
) -> tuple[float, float]:
    """Mean loss and accuracy over a dataset that the workers divide among themselves."""
    model.eval()
    sums = torch.zeros(2)
    for x, y in session.evaluation(data, batch_size=256):
        out = model(x)
        sums[0] += nn.functional.cross_entropy(out, y, reduction="sum")
        sums[1] += (out.argmax(1) == y).sum()
    model.train()
    loss, accuracy = (session.sum(sums) / len(data)).tolist()
    return loss, accuracy


def main() -> None:
    """Train with a learning rate that decays every step, and print the result of each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="the global batch")
    parser.add_argument("--limit", type=int, default=1024, help="training samples")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10's binary version")
    parser.add_argument("--depth", type=int, default=8, help="8, 14, 20, ...")
    args = parser.parse_args()

    data, origin = cifar10(args.data, train=True, limit=args.limit)
    test, _ = cifar10(args.data, train=False, limit=max(1, args.limit // 5))
    torch.manual_seed(0)
    model = resnet(args.depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    steps = args.epochs * -(-len(data) // args.batch)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with evenstep.join() as session:
        if session.is_leader:
            print(f"{len(data)} images, {origin}")
        model, optimizer, scheduler = session.prepare(
            model, optimizer, scheduler, sync_batchnorm=True
        )
        loader = session.loader(data, batch=args.batch)
        for epoch in session.epochs(args.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()
            loss, accuracy = evaluate(session, model, test)
            if session.is_leader:
                print(f"epoch {epoch + 1}  loss {loss:.4f}  accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
