"""The rendezvous of a generation, over the authenticated connections to the coordinator.

A c10d store in which ranks find each other's addresses when they make a process group. It opens no
port: what a rank sets goes to the coordinator, which passes it on to the other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from torch.distributed.distributed_c10d import Store

SLICE_S = 0.05  # of a wait, before checking whether the store was closed
TIMEOUT = timedelta(minutes=5)  # of a wait for which c10d gives none


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
            self._board.wait(SLICE_S)

    def close(self) -> None:
        """End all waits: the generation will not form, or has formed."""
        self._is_closed = True
