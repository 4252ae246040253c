"""The process groups of the generation that this worker is in.

Its ranks meet at a store that its leader hosts.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from evenstep.messages import Generation
from evenstep.train.comm.group import CPU, LAST_WORDS_S, Group, WorkerLostError
from evenstep.train.comm.transfer import Check, interruptible
from evenstep.train.failpoint import failpoint

TIMEOUT_S = 7200.0  # of an all-reduce, as a last resort: longer than the coordinator ever waits
CONNECT_S = 10.0  # to the store, for one attempt
MEET_S = 10.0  # to make a group once all ranks have reached the store


class GenerationGroups:
    """Meets the other ranks at their leader's store, and makes groups with them.

    `check` is called during every wait, and raises if waiting on makes no sense.
    """

    def __init__(self, address: str, check: Check) -> None:
        self._address, self._check = address, check
        self._own_store, self.port = _host_store(address)
        self._store: Store = self._own_store
        self._number = self._rank = self._world = 0
        self._groups: list[Group] = []
        self.control: Group

    def form(self, generation: Generation, rank: int, world: int) -> None:
        """Meet the other ranks of a generation, and make its control group."""
        self._number, self._rank, self._world = generation.number, rank, world
        self._store = self._own_store
        if rank > 0:
            self._store = _connect_store(generation.address, generation.port, self._check)
        failpoint("rendezvous")
        _await_ranks(self._store, generation.number, rank, world, self._check)
        self.control = self.make("control", CPU)

    def make(self, name: str, device: torch.device) -> Group:
        """One more group of the same ranks. All of them call it, in the same order."""
        group = Group(
            self._store,
            self._number,
            self._rank,
            self._world,
            timeout_s=TIMEOUT_S,
            meet_s=MEET_S,
            name=name,
            device=device,
            address=self._address,
            check=self._check,
            last_words_s=0.0,
        )
        self._groups.append(group)
        return group

    def close(self, wait_s: float = LAST_WORDS_S) -> None:
        """Close all groups, which unblocks workers that still wait in them."""
        groups, self._groups = self._groups, []
        for group in groups:
            group.close(wait_s)


def _host_store(address: str) -> tuple[Store, int]:
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


def _connect_store(address: str, port: int, check: Check) -> Store:
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


def _await_ranks(store: Store, generation: int, rank: int, world: int, check: Check) -> None:
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
