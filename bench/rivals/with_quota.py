"""On evenstep, each worker with a CPU quota of its own: for the search of the cluster's size.

The quota begins where training does: starting up is nobody's figure here.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import nn

import evenstep
from bench.rivals.common import Told, network, samples
from evenstep.emulate import Quota

NAME = os.environ.get("EVENSTEP_WORKER", "")


def main() -> None:
    """Train for some epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=240)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--cores", type=float, default=0.25)
    parser.add_argument("--slow", default="", help="a worker's name")
    parser.add_argument("--factor", type=float, default=1.0, help="of its cores that it has")
    parser.add_argument("--from-step", type=int, default=0, help="that it has fewer")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, told = network("cnn"), Told(args.out)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with evenstep.join(kind=f"cpu-{args.cores:g}") as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(samples("cnn"), batch=args.batch)
        with Quota(args.cores) as quota:
            quota.add(os.getpid())
            for _ in session.epochs(args.epochs):
                for x, y in loader:
                    if args.slow == NAME and session.step >= args.from_step:
                        quota.set(args.cores * args.factor)
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    if not session.void:
                        told.step(session.step, session.world)


if __name__ == "__main__":
    main()
