"""Raw throughput of Gloo's broadcast between two processes, in bytes per second."""

from __future__ import annotations

import os
import time

import torch
from torch import distributed

SIZE, NUM = 16 << 20, 25  # floats per broadcast, number of broadcasts


def main() -> None:
    """Run under torchrun with two processes."""
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    block = torch.ones(SIZE)
    distributed.broadcast(block, 0)
    distributed.barrier()
    started_s = time.monotonic()
    for _ in range(NUM):
        distributed.broadcast(block, 0)
    distributed.barrier()
    if distributed.get_rank() == 0:
        print(NUM * SIZE * 4 / (time.monotonic() - started_s), flush=True)
    os._exit(0)  # skip the shutdown, in which Gloo's threads sometimes abort the process


if __name__ == "__main__":
    main()
