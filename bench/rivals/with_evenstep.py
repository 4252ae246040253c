"""On evenstep."""

from __future__ import annotations

import logging
import os
import time

from torch import nn

import evenstep
from bench.rivals.common import Told, arguments, network, optimizer_of, samples
from bench.rivals.quota import held


def main() -> None:
    """Train until told to stop."""
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    told = Told(args.out)
    model = network(args.model)
    with evenstep.join() as session:
        model, optimizer = session.prepare(model, optimizer_of(model))
        loader = session.loader(samples(args.model, args.samples), batch=args.batch)
        slow = args.slow == os.environ["EVENSTEP_WORKER"]
        with held(args.cores) as quota:
            for _ in session.epochs(args.epochs):
                for x, y in loader:
                    if slow and quota is not None and session.step >= args.from_step:
                        quota.set(args.cores * args.factor)
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(x), y)
                    time.sleep(args.pause)
                    loss.backward()
                    optimizer.step()
                    if not session.void:
                        told.step(session.step, session.world)


if __name__ == "__main__":
    main()
