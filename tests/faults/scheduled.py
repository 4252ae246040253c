"""A loop that sets the learning rate by itself: by `session.step`, or by a counter of its own."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from bench.testbed.train import NAME, Hold, Numbers
from torch import nn

import evenstep


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--own", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    torch.set_num_threads(1)
    model = nn.Linear(8, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = 0
    with evenstep.join() as session:
        session.prepare(model, optimizer)
        loader = session.loader(Numbers(240), batch=24)
        hold = Hold(session, args.out, 0)
        for _ in session.epochs(hold.num_epochs):
            for x, y in loader:
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + (own if args.own else session.step))
                own += 1
                optimizer.zero_grad()
                hold.step()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
            if hold.is_over():
                break
    torch.save({"step": session.step}, args.out / f"{NAME}.pt")


if __name__ == "__main__":
    main()
