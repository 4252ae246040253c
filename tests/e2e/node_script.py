"""A training script for several nodes: each rank writes its results, unless one fails."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenstep


def main() -> None:
    """Train --epochs epochs on 203 samples, or at least three until rank 3 has a smaller share.

    Some ranks may be slow; one may fail in a step.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--slow", type=int, nargs="*", default=[], help="ranks")
    parser.add_argument("--slow-s", type=float, default=0.01, help="for each sample")
    parser.add_argument("--epochs", type=int, default=1_000_000)
    parser.add_argument("--fail", type=int)
    parser.add_argument("--fail-step", type=int)
    args = parser.parse_args()

    rng = torch.Generator().manual_seed(0)  # the same data on every worker
    x = torch.randn(203, 4, generator=rng, dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh(), torch.arange(203))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    with evenstep.join() as session:
        sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net, optimizer = session.prepare(net, sgd)
        loader = session.loader(data, batch=20)
        epochs, plans = [], []
        for epoch in session.epochs(args.epochs):
            seen: list[int] = []
            for xs, ys, index in loader:
                if (session.rank, session.step) == (args.fail, args.fail_step):
                    raise ZeroDivisionError("a bug in the user's loss")
                optimizer.zero_grad()
                sample_s = args.slow_s if session.rank in args.slow else 0.001
                time.sleep(len(xs) * sample_s)  # the compute
                nn.functional.mse_loss(net(xs), ys).backward()
                optimizer.step()
                seen += index.tolist()[: session.counted]
                plans.append(session.shares_at(session.step - 1))
            epochs.append(seen)
            if session.world > 3 and epoch >= 2 and plans[-1][3] < plans[0][3]:
                break
        flat = torch.cat([p.detach().flatten() for p in net.parameters()])
        result = {
            "network": os.readlink("/proc/self/ns/net"),
            "epochs": epochs,
            "plans": plans,
            "parameters": flat.tolist(),
            "digest": hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
        }
        (args.out / f"{session.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
