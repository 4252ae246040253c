"""On evenstep."""

from __future__ import annotations

import logging
import os
import time

from torch import nn

import evenstep
from bench.rivals.common import Told, arguments, network, optimizer_of, samples
from bench.rivals.quota import held
from evenstep.emulate import DeviceCurve


class Clock:
    """When it was last called."""

    at_s = 0.0

    def __call__(self, _: object) -> None:
        self.at_s = time.monotonic()


def main() -> None:
    """Train until told to stop."""
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    told = Told(args.out)
    model = network(args.model)
    computed = Clock()
    next(model.parameters()).register_post_accumulate_grad_hook(computed)  # it comes last
    with evenstep.join() as session:
        model, optimizer = session.prepare(model, optimizer_of(model))
        loader = session.loader(samples(args.model, args.samples), batch=args.batch)
        device = DeviceCurve(per_sample_s=args.per_sample)
        is_slow = args.slow == os.environ["EVENSTEP_WORKER"]
        with held(args.cores):
            for _ in session.epochs(args.epochs):
                for x, y in loader:
                    begun_s, slow = time.monotonic(), is_slow and session.step >= args.from_step
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(x), y)
                    time.sleep(args.pause)
                    device.slowed(1 / args.factor if slow else 1.0).run(session.counted, begun_s)
                    loss.backward()
                    optimizer.step()
                    if session.void:
                        told.void(computed.at_s)
                    else:
                        told.step(session.step, session.world)


if __name__ == "__main__":
    main()
