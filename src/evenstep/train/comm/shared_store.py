"""Messages between the ranks of a fixed roster, over their c10d store, outside of steps."""

from __future__ import annotations

import time
import traceback
from contextlib import suppress
from typing import Any

import msgspec
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from evenstep.errors import EvenstepError

FAILED = "evenstep/failed"
FINISH_S = 10.0


class RankFailedError(EvenstepError, RuntimeError):
    """Another rank raised; its traceback is the message."""

    def __init__(self, rank: int, traceback: str) -> None:
        super().__init__(rank, traceback)
        self.rank, self.traceback = rank, traceback

    def __str__(self) -> str:
        return f"rank {self.rank} failed:\n{self.traceback}"


class SharedStore:
    """A store shared by all ranks, used by the training thread alone."""

    def __init__(self, store: Store, rank: int, world: int, timeout_s: float) -> None:
        self._store, self.rank, self.world, self._timeout_s = store, rank, world, timeout_s

    def publish(self, topic: str, value: Any) -> None:
        """Publish this rank's value of a topic, once."""
        self._store.set(f"evenstep/{topic}/{self.rank}", msgspec.json.encode(value).decode())

    def read(self, topic: str, rank: int) -> Any:
        """A rank's value of a topic, waiting for it; another rank's failure ends the wait."""
        key, deadline_s = f"evenstep/{topic}/{rank}", time.monotonic() + self._timeout_s
        while not self._store.check([key]):
            self.check_failure()
            if time.monotonic() > deadline_s:
                raise EvenstepError(
                    f"rank {rank} did not publish its {topic} within {self._timeout_s:g} s. Is it "
                    "still running?"
                )
            time.sleep(0.01)
        return msgspec.json.decode(self._store.get(key))

    def read_all(self, topic: str) -> list[Any]:
        """Every rank's value of a topic, by rank."""
        return [self.read(topic, rank) for rank in range(self.world)]

    def publish_failure(self, error: BaseException) -> None:
        """Tell the other ranks why this one failed, unless another one failed first."""
        if self.world == 1 or isinstance(error, RankFailedError):
            return
        text = "".join(traceback.format_exception(error))
        first = msgspec.json.encode({"rank": self.rank, "told": text}).decode()
        with suppress(DistError):  # the store is gone, and so is everyone who would read this
            self._store.compare_set(FAILED, "", first)

    def check_failure(self) -> None:
        """Raise RankFailedError if another rank has failed."""
        if self.world > 1 and self._store.check([FAILED]):
            failed = msgspec.json.decode(self._store.get(FAILED))
            if failed["rank"] != self.rank:
                raise RankFailedError(failed["rank"], failed["told"])

    def finish(self, *, wait_for_all: bool) -> None:
        """Mark this rank as finished; with `wait_for_all`, wait until all ranks are."""
        keys = [f"evenstep/parted/{rank}" for rank in range(self.world)]
        deadline_s = time.monotonic() + FINISH_S
        with suppress(DistError):  # without a store there is nobody to wait for
            self._store.set(keys[self.rank], "")
            while wait_for_all and not self._store.check(keys) and time.monotonic() < deadline_s:
                time.sleep(0.01)
