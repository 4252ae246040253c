"""The position in the data: what comes next, and how much was used. The same on all workers.

It is handed over to joiners and kept in checkpoints, along with the facts of the data's order,
which must never change in a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from evenstep.config import BatchSettings
from evenstep.errors import ConfigError
from evenstep.train.data.order import Order

IN_STATE = ("epoch", "cursor", "index", "before", "used", "digest", "in_loop", "looks")
"""What changes from state to state; the rest of it are the facts of the order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """Where the run is in its data."""

    epoch: int = 0
    cursor: int = 0  # the sample of the epoch that comes next
    index: int = 0  # steps of the epoch before it
    before: int = 0  # samples of earlier epochs, also those that were left early or left out
    used: int = 0  # samples that the run has trained on

    def after(self, end: int) -> DataPosition:
        """After a step up to a sample of the epoch, which an adopted position may include."""
        if end <= self.cursor:
            return self
        used = self.used + end - self.cursor
        return replace(self, cursor=end, index=self.index + 1, used=used)

    def at_epoch(self, epoch: int, length: int | None) -> DataPosition:
        """At the beginning of a later epoch, where epochs have `length` samples; None: unknown."""
        before = self.used if length is None else epoch * length
        return DataPosition(epoch=epoch, before=before, used=self.used)

    def at_end(self, end: int) -> DataPosition:
        """At the end of the epoch: samples up to there that are left out count as no longer due."""
        return replace(self, cursor=end)


def pack(position: DataPosition, order: Order, batch: BatchSettings) -> dict[str, Any]:
    """A position as state, with the facts of the order."""
    return {**_facts(order, batch), **asdict(position), "digest": _digest(position, order)}


def unpack(state: Mapping[str, Any], order: Order, batch: BatchSettings) -> DataPosition:
    """The position of a state. Refuses one in another order or of another batch size."""
    theirs = {key: value for key, value in state.items() if key not in IN_STATE}
    theirs.setdefault("order", "")  # older checkpoints have none, nor much of what follows
    if theirs != (mine := _facts(order, batch)):
        raise ConfigError("loader", f"was {theirs} when the run began, and is {mine} now")
    epoch, cursor = state["epoch"], state["cursor"]
    before = state.get("before", epoch * (order.length or 0))
    return DataPosition(
        epoch=epoch,
        cursor=cursor,
        index=state.get("index", cursor // (batch.size or cursor or 1)),
        before=before,
        used=state.get("used", before + cursor),
    )


def check_digest(state: Mapping[str, Any], position: DataPosition, order: Order) -> None:
    """Refuse a sampler or stream that gives other samples at a state's position."""
    if (digest := state.get("digest")) and digest != _digest(position, order):
        raise ConfigError(
            "loader",
            f"its sampler or stream gives the samples of epoch {position.epoch} in another order "
            "than the run has them. It must depend on the epoch only; random numbers are seeded "
            "for it",
        )


def _digest(position: DataPosition, order: Order) -> int:
    return order.samples.digest(position.epoch, position.cursor, position.cursor)


def _facts(order: Order, batch: BatchSettings) -> dict[str, Any]:
    sizes = {"batch": batch.size, "per_worker": batch.per_worker, "limit": batch.limit}
    return {**order.facts, **sizes}
