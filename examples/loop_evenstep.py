"""The loop of `loop_plain.py` on evenstep.

    python examples/loop_evenstep.py
    torchrun --nproc-per-node=3 examples/loop_evenstep.py

Only an import and four lines differ: those with `session` in them.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenstep


def main() -> None:
    """Fit a small network to generated data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--limit", type=int, default=4096, help="samples")
    args = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(args.limit, 8)
    y = x.sum(1, keepdim=True)
    data = TensorDataset(x, y)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with evenstep.join() as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(data, batch=args.batch)
        for epoch in session.epochs(args.epochs):
            for xs, ys in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(xs), ys)
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch + 1}  loss {nn.functional.mse_loss(model(x), y).item():.4f}")


if __name__ == "__main__":
    main()
