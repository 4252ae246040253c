"""What ranks tell each other before the first step and when one of them fails, over the store."""

from __future__ import annotations

import time
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from evenstep.errors import EvenstepError

FAILED = "evenstep/failed"
PARTING_S = 10.0


class PeerFailedError(EvenstepError, RuntimeError):
    """Another rank raised; its traceback is the message."""

    def __init__(self, rank: int, told: str) -> None:
        super().__init__(rank, told)
        self.rank, self.told = rank, told

    def __str__(self) -> str:
        return f"rank {self.rank} failed:\n{self.told}"


class ModelsDifferError(EvenstepError, ValueError):
    """Two ranks prepared different models."""


class Meeting:
    """A store shared by all ranks, used by the training thread alone."""

    def __init__(self, store: Store, rank: int, world: int, timeout_s: float) -> None:
        self._store, self.rank, self.world = store, rank, world
        self._timeout = timedelta(seconds=timeout_s)

    def tell(self, topic: str, value: Any) -> None:
        """Say something that all may read, once a topic and rank."""
        self._store.set(f"evenstep/{topic}/{self.rank}", msgspec.json.encode(value).decode())

    def hear(self, topic: str, rank: int) -> Any:
        """What a rank said, waiting for it; another rank's failure ends the wait."""
        key, deadline = f"evenstep/{topic}/{rank}", time.monotonic() + self._timeout.total_seconds()
        while not self._store.check([key]):
            self.check_failure()
            if time.monotonic() > deadline:
                raise EvenstepError(f"rank {rank} did not say its {topic}. Is it still running?")
            time.sleep(0.01)
        return msgspec.json.decode(self._store.get(key))

    def hear_all(self, topic: str) -> list[Any]:
        """What every rank said, by rank."""
        return [self.hear(topic, rank) for rank in range(self.world)]

    def fail(self, error: BaseException) -> None:
        """Leave word of why this rank ends, unless another was first."""
        if self.world == 1 or isinstance(error, PeerFailedError):
            return
        told = "".join(traceback.format_exception(error))
        first = msgspec.json.encode({"rank": self.rank, "told": told}).decode()
        with suppress(DistError):  # the store is gone, and with it whoever would listen
            self._store.compare_set(FAILED, "", first)

    def check_failure(self) -> None:
        """Raise if another rank has failed."""
        if self.world > 1 and self._store.check([FAILED]):
            failed = msgspec.json.decode(self._store.get(FAILED))
            if failed["rank"] != self.rank:
                raise PeerFailedError(failed["rank"], failed["told"])

    def part(self, *, stay: bool) -> None:
        """Say that this rank is done, and stay, if asked to, until all have said so."""
        keys = [f"evenstep/parted/{rank}" for rank in range(self.world)]
        deadline = time.monotonic() + PARTING_S
        with suppress(DistError):  # without a store there is nobody to wait for
            self._store.set(keys[self.rank], "")
            while stay and not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(0.01)


def check_models(meeting: Meeting, model: torch.nn.Module) -> None:
    """Refuse models that differ between ranks, naming the first parameter that does."""
    mine = rows(model)
    meeting.tell("model", mine)
    leaders = [tuple(row) for row in meeting.hear("model", 0)]
    for theirs, ours in zip(leaders, map(tuple, mine), strict=False):
        if theirs != ours:
            raise ModelsDifferError(
                f"rank {meeting.rank} has {_told(ours)} where rank 0 has {_told(theirs)}. "
                "Build the same model on every rank."
            )
    if len(leaders) != len(mine):
        raise ModelsDifferError(
            f"rank {meeting.rank} has {len(mine)} parameters and buffers, rank 0 {len(leaders)}. "
            "Build the same model on every rank."
        )


def rows(model: torch.nn.Module) -> list[tuple[Any, ...]]:
    """What must be the same of a model on all workers: every parameter and buffer of it."""
    mine = [_row(n, p, p.requires_grad) for n, p in model.named_parameters()]
    return mine + [_row(n, b, False) for n, b in model.named_buffers()]


def _row(name: str, tensor: torch.Tensor, trains: bool) -> tuple[Any, ...]:
    # What is sent and summed is memory as it lies, channels last or not.
    lies = "" if tensor.is_contiguous() else f", strides {tensor.stride()}"
    return name, list(tensor.shape), str(tensor.dtype), trains, lies


def _told(row: Any) -> str:
    name, shape, dtype, trains, lies = row
    return f"{name} {tuple(shape)} {dtype}{'' if trains else ' (frozen)'}{lies}"
