"""The process groups of the generation that this worker is in."""

from __future__ import annotations

import torch
from torch.distributed.distributed_c10d import Store

from evenstep.messages import Generation
from evenstep.train.comm.group import CPU, LAST_WORDS_S, Group
from evenstep.train.comm.rendezvous import await_ranks, connect_store, host_store
from evenstep.train.comm.transfer import Check
from evenstep.train.failpoint import failpoint

TIMEOUT_S = 7200.0  # of an all-reduce, as a last resort: longer than the coordinator ever waits
MEET_S = 10.0  # to make a group once all ranks have reached the store


class GenerationGroups:
    """Meets the other ranks at their leader's store, and makes groups with them.

    `check` is called during every wait, and raises if waiting on makes no sense.
    """

    def __init__(self, address: str, check: Check) -> None:
        self._address, self._check = address, check
        self._own_store, self.port = host_store(address)
        self._store: Store = self._own_store
        self._number = self._rank = self._world = 0
        self._groups: list[Group] = []
        self.control: Group

    def form(self, generation: Generation, rank: int, world: int) -> None:
        """Meet the other ranks of a generation, and make its control group."""
        self._number, self._rank, self._world = generation.number, rank, world
        self._store = self._own_store
        if rank > 0:
            self._store = connect_store(generation.address, generation.port, self._check)
        failpoint("rendezvous")
        await_ranks(self._store, generation.number, rank, world, self._check)
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
