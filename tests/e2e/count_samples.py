"""A training script for torchrun: writes which samples each rank trained on, by epoch."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenstep


def main(out: Path, loader_workers: int, compiled: bool) -> None:
    """Train at least three epochs on 203 samples, until slow rank 1 has a smaller share."""
    x = torch.randn(203, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(203))
    with evenstep.join() as session:
        torch.manual_seed(session.rank)
        net = nn.Linear(4, 1)
        net.compile(backend="aot_eager", dynamic=True) if compiled else None
        net, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        loader = session.loader(data, batch=20, num_workers=loader_workers)
        epochs, plans = [], []
        for epoch in session.epochs(1_000_000):
            seen: list[int] = []
            for xs, ys, index in loader:
                optimizer.zero_grad()
                time.sleep(len(xs) * (0.004 if session.rank == 1 else 0.001))  # the compute
                nn.functional.mse_loss(net(xs), ys).backward()
                optimizer.step()
                seen += index.tolist()[: session.counted]
                plans.append(session.shares_at(session.step - 1))
            epochs.append(seen)
            if epoch >= 2 and ("kept" in sys.argv or plans[-1][1] < min(plans[-1][::2])):
                break
        result = {"epochs": epochs, "plans": plans, "weight": net.weight.tolist()}
        (out / f"{session.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), "compiled" in sys.argv)
