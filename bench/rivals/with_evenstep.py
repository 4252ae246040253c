"""On evenstep."""

from __future__ import annotations

import logging
import time

from torch import nn

import evenstep
from bench.rivals.common import PAUSE_S, Told, arguments, network, optimizer_of, samples


def main() -> None:
    """Train until told to stop."""
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    told = Told(args.out)
    model = network(args.model)
    with evenstep.join() as session:
        model, optimizer = session.prepare(model, optimizer_of(model))
        loader = session.loader(samples(args.model), batch=args.batch)
        for _ in session.epochs(1_000_000):
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                time.sleep(PAUSE_S)
                loss.backward()
                optimizer.step()
                if not session.void:
                    told.step(session.step, session.world)


if __name__ == "__main__":
    main()
