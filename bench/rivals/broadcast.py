"""Raw broadcast between two processes: megabytes a second, as Gloo does it."""

from __future__ import annotations

import os
import time

import torch
from torch import distributed

SIZE, NUM = 16 << 20, 25  # floats of a broadcast, broadcasts


def main() -> None:
    """Started under torchrun with two processes."""
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    block = torch.ones(SIZE)
    distributed.broadcast(block, 0)
    distributed.barrier()
    begun_s = time.monotonic()
    for _ in range(NUM):
        distributed.broadcast(block, 0)
    distributed.barrier()
    if distributed.get_rank() == 0:
        print(NUM * SIZE * 4 / (time.monotonic() - begun_s), flush=True)
    os._exit(0)  # not the usual way out: now and then Gloo's own threads abort the process in it


if __name__ == "__main__":
    main()
