"""Trains with evenstep in turns, under any launcher."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn

import evenstep
from bench.rivals.training import network, samples


def main() -> None:
    """Train some steps whenever a `go` file appears, and write how long they took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="per turn")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = network("cnn")
    with evenstep.join(policy="uniform") as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = session.prepare(model, optimizer)
        # As many as Fashion-MNIST has: with epochs of ten steps, their ends would dominate.
        loader = session.loader(samples("cnn", 60_000), batch=args.batch)
        turn, started_s = -1, 0.0
        for _ in session.epochs(1_000_000):
            for x, y in loader:
                if session.step % args.steps == 0:
                    if turn >= 0:
                        result = args.out / f"done-{turn}-{session.rank}"
                        result.with_suffix(".part").write_text(str(time.monotonic() - started_s))
                        result.with_suffix(".part").rename(result)
                    turn += 1
                    if turn == args.turns:
                        os._exit(0)  # without waiting for the others
                    while not (args.out / f"go-{turn}").exists():
                        time.sleep(0.002)
                    started_s = time.monotonic()
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()


if __name__ == "__main__":
    main()
