"""A training script for torchrun in which one rank raises."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenstep


def main() -> None:
    """Rank 3 has a bug in step 5."""
    data = TensorDataset(torch.randn(400, 4), torch.randn(400, 1))
    with evenstep.join() as session:
        net = nn.Linear(4, 1)
        net, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        for step, (x, y) in enumerate(session.loader(data, batch=20)):
            if step == 5 and session.rank == 3:
                raise ZeroDivisionError("a bug in the user's loss")
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
