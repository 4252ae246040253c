"""evenstep."""

from __future__ import annotations

import logging
import os
import time

from torch import nn

import evenstep
from bench.rivals.quota import limit_cores
from bench.rivals.training import (
    StepLog,
    network,
    optimizer_of,
    parse_arguments,
    samples,
)
from evenstep.emulate import DeviceCurve


class Clock:
    """Remembers when it was last called."""

    at_s = 0.0

    def __call__(self, _: object) -> None:
        self.at_s = time.monotonic()


def main() -> None:
    """Train until stopped."""
    args = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    log = StepLog(args.out)
    model = network(args.model)
    computed = Clock()
    next(model.parameters()).register_post_accumulate_grad_hook(
        computed
    )  # its gradient is the last
    with evenstep.join() as session:
        model, optimizer = session.prepare(model, optimizer_of(model))
        loader = session.loader(samples(args.model, args.samples), batch=args.batch)
        device = DeviceCurve(per_sample_s=args.per_sample)
        is_slow = args.slow == os.environ["EVENSTEP_WORKER"]
        with limit_cores(args.cores):
            for _ in session.epochs(args.epochs):
                for x, y in loader:
                    started_s, slow = time.monotonic(), is_slow and session.step >= args.from_step
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(x), y)
                    time.sleep(args.pause)
                    device.slowed(1 / args.factor if slow else 1.0).run(session.counted, started_s)
                    loss.backward()
                    optimizer.step()
                    if session.void:
                        log.void(computed.at_s)
                    else:
                        log.step(session.step - 1, session.world)


if __name__ == "__main__":
    main()
