"""Linear regression on generated data: a whole script, with a schedule, evaluation and saving.

    python examples/linear_regression.py --save model.pt
    torchrun --nproc-per-node=3 examples/linear_regression.py --save model.pt
    evenstep run --workers 3 examples/linear_regression.py --save model.pt

Both losses are exact means over the samples of all workers.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenstep


def main() -> None:
    """Recover the weights that generated the data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--limit", type=int, default=8192, help="samples")
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--save", metavar="FILE", help="file for the trained model")
    args = parser.parse_args()

    rng = torch.Generator().manual_seed(0)  # the same data on every worker
    truth = torch.randn(args.features, 1, generator=rng)
    x = torch.randn(args.limit, args.features, generator=rng)
    y = x @ truth + 0.1 * torch.randn(args.limit, 1, generator=rng)
    split = args.limit * 7 // 8
    train, held_out = TensorDataset(x[:split], y[:split]), TensorDataset(x[split:], y[split:])

    model = nn.Linear(args.features, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = args.epochs * -(-split // args.batch)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with evenstep.join() as session:
        model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
        loader = session.loader(train, batch=args.batch)
        for epoch in session.epochs(args.epochs):
            total = torch.zeros(())
            for xs, ys in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(xs), ys)
                loss.backward()
                optimizer.step()
                scheduler.step()
                total += loss.detach() * session.counted
            error = torch.zeros(())
            with torch.no_grad():
                for xs, ys in session.evaluation(held_out, batch_size=512):
                    error += nn.functional.mse_loss(model(xs), ys, reduction="sum")
            # All workers must call sum; one prints.
            mean, error = session.sum(total) / len(train), session.sum(error) / len(held_out)
            if session.is_leader:
                print(f"epoch {epoch + 1}  loss {mean:.4f}  held-out loss {error:.4f}")
        if args.save and session.is_leader:
            torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
