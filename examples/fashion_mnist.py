"""A convolutional network on Fashion-MNIST.

    python examples/fashion_mnist.py
    torchrun --nproc-per-node=3 examples/fashion_mnist.py --epochs 5 --limit 60000

The data come from --data, a folder with the four IDX files, or from Debian's package
dataset-fashion-mnist. Without them, generated images of the same shape are used.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from image_data import fashion_mnist
from torch import nn
from torch.utils.data import TensorDataset

import evenstep


def network() -> nn.Sequential:
    """Two convolutions and two linear layers, about 100 000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def evaluate(
    session: evenstep.Session, model: nn.Module, data: TensorDataset
) -> tuple[float, float]:
    """Mean loss and accuracy over a dataset that the workers divide among themselves."""
    model.eval()
    sums = torch.zeros(2)
    for x, y in session.evaluation(data, batch_size=500):
        out = model(x)
        sums[0] += nn.functional.cross_entropy(out, y, reduction="sum")
        sums[1] += (out.argmax(1) == y).sum()
    model.train()
    loss, accuracy = (session.sum(sums) / len(data)).tolist()
    return loss, accuracy


def main() -> None:
    """Train, and print loss and accuracy after every epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=128, help="the global batch")
    parser.add_argument("--limit", type=int, default=4096, help="training samples")
    parser.add_argument("--data", type=Path, help="folder with the IDX files")
    args = parser.parse_args()

    data, origin = fashion_mnist(args.data, train=True, limit=args.limit)
    test, _ = fashion_mnist(args.data, train=False, limit=max(1, args.limit // 6))
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with evenstep.join() as session:
        if session.is_leader:
            print(f"{len(data)} images, {origin}")
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(data, batch=args.batch)
        for epoch in session.epochs(args.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            loss, accuracy = evaluate(session, model, test)
            if session.is_leader:
                print(f"epoch {epoch + 1}  loss {loss:.4f}  accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
