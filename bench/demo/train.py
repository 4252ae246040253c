"""The script that the demo trains: a CNN on Fashion-MNIST.

A user's script, but for two calls that make the machine uneven: `line_up` and the throttle, which
do nothing where there are CPU quotas.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import evenstep
from bench.workloads import cnn_double
from evenstep.emulate import line_up, own_throttle


def main() -> None:
    """Train, and save the parameters before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, required=True, help="at most")
    parser.add_argument("--samples", type=int, required=True, help="per epoch")
    parser.add_argument("--batch", type=int, required=True, help="the global batch")
    parser.add_argument("--stop", type=Path, help="a file: end after the epoch in which it appears")
    parser.add_argument("--out", type=Path, required=True, help="where to save the parameters")
    args = parser.parse_args()

    throttle = own_throttle()
    torch.manual_seed(0)
    work = cnn_double(args.samples)
    start = {name: value.clone() for name, value in work.model.state_dict().items()}
    optimizer = torch.optim.SGD(work.model.parameters(), lr=work.lr, momentum=0.9)
    lined_up = False
    with evenstep.join() as session:
        model, optimizer = session.prepare(work.model, optimizer)
        loader = session.loader(work.data, batch=args.batch)
        for epoch in session.epochs(args.epochs):
            for x, y in loader:
                began_s = time.monotonic()
                optimizer.zero_grad()
                loss = cross_entropy(model(x), y)
                # Before backward, which must not wait and takes about twice as long as forward.
                throttle.after(3 * (time.monotonic() - began_s))
                loss.backward()
                optimizer.step()
                if not lined_up:  # the first step creates groups and buffers
                    line_up()
                    lined_up = True
            num_epochs = epoch + 1
            if session.sum(float(args.stop is not None and args.stop.exists())):
                break
        loss_sum = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for x, y in session.evaluation(work.data, batch_size=512):
                loss_sum += cross_entropy(model(x), y, reduction="sum")
        mean = float(session.sum(loss_sum)) / len(work.data)
        if session.is_leader:
            found = {"start": start, "end": model.state_dict(), "loss": mean, "epochs": num_epochs}
            torch.save(found, args.out)


if __name__ == "__main__":
    main()
