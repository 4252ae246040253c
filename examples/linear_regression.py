"""Linear regression on made-up data.

    python examples/linear_regression.py
    torchrun --nproc-per-node=3 examples/linear_regression.py

The loss told is the exact mean over all workers' samples.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenstep


def main() -> None:
    """Find the weights that the data were made with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--limit", type=int, default=8192, help="samples")
    parser.add_argument("--features", type=int, default=32)
    args = parser.parse_args()

    chance = torch.Generator().manual_seed(0)  # the same data on every worker
    truth = torch.randn(args.features, 1, generator=chance)
    x = torch.randn(args.limit, args.features, generator=chance)
    data = TensorDataset(x, x @ truth + 0.1 * torch.randn(args.limit, 1, generator=chance))

    model = nn.Linear(args.features, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with evenstep.join() as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(data, batch=args.batch)
        for epoch in session.epochs(args.epochs):
            total = torch.zeros(())
            for xs, ys in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(xs), ys)
                loss.backward()
                optimizer.step()
                total += loss.detach() * session.counted
            mean = session.sum(total) / len(data)  # all workers ask, the leader tells
            if session.is_leader:
                off = (model.weight.detach().T - truth).abs().max()
                print(f"epoch {epoch + 1}  loss {mean:.4f}  largest error of a weight {off:.4f}")


if __name__ == "__main__":
    main()
