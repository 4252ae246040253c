"""The rendezvous of a generation, over the authenticated connections to the coordinator.

Ranks find each other's addresses in a c10d store, and make their process groups. The store opens no
port: what a rank sets goes to the coordinator, which passes it on to the other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed.distributed_c10d import Store

from evenstep.messages import Generation
from evenstep.train.comm.group import CPU, LAST_WORDS_S, Group
from evenstep.train.comm.transfer import SLICE_S, Check
from evenstep.train.failpoint import failpoint

WAIT_S = 0.05  # poll interval of a wait in c10d, to notice that the store was closed
TIMEOUT_S = 7200.0  # last resort of an all-reduce: longer than the coordinator ever waits
MEET_S = 10.0  # to make a group once all ranks are at the rendezvous
TIMEOUT = timedelta(minutes=5)  # of waits for which c10d gives no timeout


class Board(Protocol):
    """What the ranks of each generation have published; the connection to the coordinator."""

    def publish(self, generation: int, key: str, value: bytes) -> None: ...
    def published(self, generation: int, key: str) -> bytes | None: ...
    def wait(self, seconds: float) -> None: ...


class RendezvousStore(Store):
    """The store of one generation. c10d calls it from a thread that `close` unblocks.

    `prefix` keeps several groups of processes apart that meet in one generation.
    """

    def __init__(self, board: Board, generation: int, prefix: str = "") -> None:
        super().__init__()
        self._board, self._generation, self._prefix = board, generation, prefix
        self._is_closed = False

    def set(self, key: str, value: bytes | str) -> None:
        """Publish a value to the other ranks of the generation."""
        data = value.encode() if isinstance(value, str) else value
        self._board.publish(self._generation, self._prefix + key, data)

    def get(self, key: str) -> bytes:
        """A value, waiting for it."""
        self.wait([key])
        value = self._find(key)
        assert value is not None
        return value

    def _find(self, key: str) -> bytes | None:
        return self._board.published(self._generation, self._prefix + key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return all(self._find(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta = TIMEOUT) -> None:
        """Wait for keys. Raises RuntimeError, as c10d expects, if they do not come."""
        until_s = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if self._is_closed or time.monotonic() > until_s:
                raise RuntimeError(f"generation {self._generation} lacks {', '.join(keys)}")
            self._board.wait(WAIT_S)

    def close(self) -> None:
        """End all waits: the generation will not form, or has formed."""
        self._is_closed = True


class GenerationGroups:
    """Meets the other ranks of a generation, and makes groups with them.

    `check` is called during every wait, and raises if there is nothing left to wait for. `address`
    is where other ranks can reach this one. If workers have several processes each, those with the
    same `place` on their hosts meet.
    """

    def __init__(self, board: Board, address: str, check: Check, place: int = 0) -> None:
        self._board, self._address, self._check = board, address, check
        self._prefix = f"process{place}/" if place else ""
        self._number = self._rank = self._world = 0
        self._groups: list[Group] = []
        self._store: RendezvousStore | None = None
        self.before_close: Callable[[], None] = lambda: None
        self.is_open = False
        self.control: Group

    def form(self, generation: Generation, rank: int, world: int) -> None:
        """Meet the other ranks of a generation, and make its control group."""
        self._number, self._rank, self._world = generation.number, rank, world
        self._store = RendezvousStore(self._board, generation.number, self._prefix)
        failpoint("rendezvous")
        self._await_ranks(self._store)
        self.control, self.is_open = self.make("control", CPU), True

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
        self.before_close()
        self.is_open = False
        if self._store is not None:
            self._store.close()
        groups, self._groups = self._groups, []
        for group in groups:
            group.close(wait_s)
