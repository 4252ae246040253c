"""torchft's managed DDP, as in its documentation. Each replica is one process."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from itertools import cycle
from typing import Any

from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import DataLoader
from torchft import (  # type: ignore[import-not-found]
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)

from bench.rivals.training import (
    StepLog,
    network,
    optimizer_of,
    parse_arguments,
    samples,
)


def main() -> None:
    """Train until killed."""
    args = parse_arguments()
    log = StepLog(args.out)
    # torchrun would host this store for the ranks of one replica.
    store = TCPStore(
        "127.0.0.1", int(os.environ["MASTER_PORT"]), None, True, wait_for_workers=False
    )
    net = network(args.model)
    inner = optimizer_of(net)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": net.state_dict(), "optimizer": inner.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=save,
        replica_id=f"replica_{os.environ['REPLICA']}",
        timeout=timedelta(seconds=60),
    )
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, inner)
    world = int(os.environ["REPLICAS"])
    for x, y in cycle(
        DataLoader(samples(args.model, args.samples), batch_size=args.batch // world)
    ):
        before = manager.current_step()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        time.sleep(args.pause)
        loss.backward()
        optimizer.step()
        if manager.current_step() > before:
            log.step(manager.current_step(), manager.num_participants())
    del store


if __name__ == "__main__":
    main()
