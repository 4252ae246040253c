"""Plain DDP with checkpoints, for checkpoint-restart and for torchrun's elastic restart."""

from __future__ import annotations

import os
import signal
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from bench.rivals.quota import limit_cores
from bench.rivals.training import (
    StepLog,
    network,
    optimizer_of,
    parse_arguments,
    samples,
)

EVERY = 10  # steps between checkpoints


def main() -> None:
    """Train from the newest checkpoint until stopped."""
    args = parse_arguments()
    log = StepLog(args.out)
    stop = torch.zeros(1)
    if args.graceful:
        signal.signal(signal.SIGTERM, lambda *_: stop.fill_(1))
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    net, step, path = network(args.model), 0, args.out / "checkpoint.pt"
    optimizer = optimizer_of(net)
    if path.exists():
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    model = DistributedDataParallel(net)
    data = samples(args.model, args.samples)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    with limit_cores(args.cores):
        for x, y in cycle(DataLoader(data, batch_size=args.batch // world, sampler=sampler)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            time.sleep(args.pause)
            loss.backward()
            optimizer.step()
            step += 1
            log.step(step, world)
            stopping = stop.clone()
            if args.graceful:
                torch.distributed.all_reduce(stopping)
            if rank == 0 and (stopping > 0 or step % EVERY == 0):
                _save(path, {"model": net.state_dict(), "optimizer": optimizer.state_dict()}, step)
            if stopping > 0:
                os._exit(0)  # the fastest exit


def _save(path: Path, state: dict[str, Any], step: int) -> None:
    part = path.with_suffix(".part")
    torch.save({**state, "step": step}, part)
    part.replace(path)


if __name__ == "__main__":
    main()
