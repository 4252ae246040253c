"""A small model on emulated devices: each worker waits out the step-time curve of its device.

evenstep run --workers 3 bench/scripts/emulated_devices.py --slow w1 --slow-from 250
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenstep
from evenstep.emulate import DeviceCurve


def main() -> None:
    """Train; from a step on, some devices are three times as slow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--slow", default="", help="names of workers, with commas")
    parser.add_argument("--slow-from", type=int, default=0, help="step")
    parser.add_argument("--out", type=Path, help="folder for the trained model")
    args = parser.parse_args()

    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(9600, 16, generator=rng)
    data = TensorDataset(x, (x.sum(1, keepdim=True) * 0.2).tanh())
    is_slow = os.environ.get("EVENSTEP_WORKER", "") in args.slow.split(",")
    device = DeviceCurve(per_sample_s=0.0012, fixed_s=0.004)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters())
    with evenstep.join() as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(data, batch=args.batch)
        for _ in session.epochs(args.epochs):
            for xs, ys in loader:
                begun_s = time.monotonic()
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(xs), ys)
                slowed = is_slow and session.step >= args.slow_from
                device.slowed(3.0 if slowed else 1.0).run(session.counted, begun_s)
                loss.backward()
                optimizer.step()
        if args.out and session.is_leader:
            torch.save(model.state_dict(), args.out / "model.pt")


if __name__ == "__main__":
    main()
