"""The process groups of the generation that this worker is in."""

from __future__ import annotations

import time

import torch

from evenstep.messages import Generation
from evenstep.train.comm.group import CPU, LAST_WORDS_S, Group
from evenstep.train.comm.rendezvous import Board, RendezvousStore
from evenstep.train.comm.transfer import SLICE_S, Check
from evenstep.train.failpoint import failpoint

TIMEOUT_S = 7200.0  # of an all-reduce, as a last resort: longer than the coordinator ever waits
MEET_S = 10.0  # to make a group once all ranks are at the rendezvous


class GenerationGroups:
    """Meets the other ranks of a generation, and makes groups with them.

    `check` is called during every wait, and raises if waiting on makes no sense. `address` is where
    other ranks can reach this one. If workers have several processes each, those with the same
    `place` on their hosts meet.
    """

    def __init__(self, board: Board, address: str, check: Check, place: int = 0) -> None:
        self._board, self._address, self._check = board, address, check
        self._prefix = f"process{place}/" if place else ""
        self._number = self._rank = self._world = 0
        self._groups: list[Group] = []
        self._store: RendezvousStore | None = None
        self.control: Group

    def form(self, generation: Generation, rank: int, world: int) -> None:
        """Meet the other ranks of a generation, and make its control group."""
        self._number, self._rank, self._world = generation.number, rank, world
        self._store = RendezvousStore(self._board, generation.number, self._prefix)
        failpoint("rendezvous")
        self._await_ranks(self._store)
        self.control = self.make("control", CPU)

    def _await_ranks(self, store: RendezvousStore) -> None:
        """Wait until all ranks are at the rendezvous.

        Making a group has a deadline, and a rank may be in the middle of a long backward pass.
        """
        keys = [f"here/{rank}" for rank in range(self._world)]
        store.set(keys[self._rank], b"")
        began_s = time.monotonic()
        while not store.check(keys):
            self._check(time.monotonic() - began_s)
            self._board.wait(SLICE_S)

    def make(self, name: str, device: torch.device) -> Group:
        """One more group of the same ranks. All of them call it, in the same order."""
        assert self._store is not None
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
        if self._store is not None:
            self._store.close()
        groups, self._groups = self._groups, []
        for group in groups:
            group.close(wait_s)
