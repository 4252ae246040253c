"""The rendezvous of a generation: at a store that its leader hosts."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from evenstep.train.comm.group import WorkerLostError
from evenstep.train.comm.transfer import Check, interruptible

CONNECT_S = 10.0  # for one attempt


def host_store(address: str) -> tuple[Store, int]:
    """A store of this worker's own, for the generations that it leads, and its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.bind((address, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    store = TCPStore(
        address, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def connect_store(address: str, port: int, check: Check) -> Store:
    """The store that a leader hosts; WorkerLostError if nothing listens there any more."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
        # Only now: TCPStore itself retries a refused connection for minutes.
        timeout = timedelta(seconds=CONNECT_S)
        return interruptible(
            lambda: TCPStore(address, port, None, False, timeout, wait_for_workers=False), check
        )
    except (OSError, RuntimeError) as e:
        raise WorkerLostError(f"the leader's store at {address}:{port} is gone: {e}") from e


def await_ranks(store: Store, generation: int, rank: int, world: int, check: Check) -> None:
    """Wait until all ranks of a generation have reached its store.

    Making a group blocks and cannot be interrupted, so nobody starts before all are there.
    """
    keys = [f"evenstep/{generation}/here/{other}" for other in range(world)]
    began_s = time.monotonic()
    try:
        store.set(keys[rank], "")
        while not store.check(keys):
            check(time.monotonic() - began_s)
            time.sleep(0.002)
    except DistError as e:
        raise WorkerLostError(f"the leader's store is gone: {e}") from e
