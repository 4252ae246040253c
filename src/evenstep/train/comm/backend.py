"""Gloo and NCCL process groups: how they are made, aborted and ended.

They are constructed directly and never registered with torch.distributed, so that a generation's
group can be replaced while training runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from evenstep.train.comm.forks import never_freed_in_forks

POLL_S = 0.0002  # between two polls of an NCCL operation
FLUSH_S = 60.0  # for a GPU to finish the all-reduces that the host has queued
ABORT_TAG = 2**31 - 1  # tag of a receive that no rank ever sends to
ON_ERROR = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")


def make_backend(
    store: Store, rank: int, world: int, device: torch.device, address: str, timeout: timedelta
) -> Any:
    """NCCL for tensors on CUDA, Gloo for tensors in host memory. Blocks until all ranks call it."""
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = never_freed_in_forks(ProcessGroupNCCL(store, rank, world, options))
        with torch.cuda.device(device):  # the current device is per thread
            # Connect now, within the timeout: NCCL otherwise connects in the first all-reduce.
            nccl.eager_connect_single_device(device)
        return nccl
    from torch.distributed import ProcessGroupGloo

    if not address or "GLOO_SOCKET_IFNAME" in os.environ:  # the user's choice of interface wins
        return never_freed_in_forks(ProcessGroupGloo(store, rank, world, timeout))
    gloo: Any = ProcessGroupGloo  # the stubs lack its options
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address)]
    return never_freed_in_forks(gloo(store, rank, world, options))


def abort_gloo(backend: Any, rank: int, world: int) -> None:
    """Fail every operation that is blocked in a Gloo group, on this rank.

    Gloo has no call for it. But a receive that times out closes all connections of its context,
    which the collectives share; and once they are closed, the other ranks fail at once as well.
    """
    for other in range(world):
        if other == rank:
            continue
        try:
            receive = never_freed_in_forks(backend.recv([torch.zeros(1)], other, ABORT_TAG))
        except RuntimeError:
            continue  # the connection to this rank is broken already: nothing can time out on it
        try:
            receive.wait(timedelta(milliseconds=1))
        except RuntimeError as e:
            if "Timed out" in str(e):
                return  # else that rank closed its connection just now, and the others are open


def end_nccl(backend: Any, newest: Any) -> None:
    """End an NCCL group after its newest operation that still counts: abort stops all others."""
    until_s = time.monotonic() + FLUSH_S
    while newest is not None and not newest.is_completed() and time.monotonic() < until_s:
        time.sleep(POLL_S)
    backend.abort()


def ends_on_error() -> bool:
    """Whether NCCL's watchdog kills the process after a failed operation, as it does by default."""
    mode = next((os.environ[name] for name in ON_ERROR if name in os.environ), "")
    return mode not in ("0", "2")  # "no handling" and "clean up only"


@contextmanager
def surviving_errors(wanted: bool) -> Iterator[None]:
    """If `wanted`, NCCL groups made in this context do not kill the process when they fail.

    A group reads the environment once, when it is made. The user's own setting wins.
    """
    if not wanted or any(name in os.environ for name in ON_ERROR):
        yield
        return
    os.environ[ON_ERROR[0]] = "0"
    try:
        yield
    finally:
        os.environ.pop(ON_ERROR[0], None)
