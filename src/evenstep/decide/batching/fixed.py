"""`fixed`: shares given by hand, such as 2,2,2,15."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from evenstep.decide.batching.rules import hold, require
from evenstep.decide.split import in_proportion
from evenstep.errors import ConfigError, PausedError
from evenstep.ports import Move
from evenstep.types import Fleet, FloatArray, IntArray, Outcome, WorkerId

NEXT_TO_NOTHING = 1e-12
"""The weight of a share of 0 among proportions: it gets a sample only if no one else can."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """The fleet that the shares were given for."""

    by_id: dict[WorkerId, int]
    by_kind: dict[str, float]  # mean
    mean: float


class Fixed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shares the user gives, kept while the fleet is the one they were given for.

    A list is in the order of worker ids; a mapping names workers or kinds, a worker's own name
    first. After a change of membership the same figures serve as proportions, a worker that was
    not foreseen counting as much as its kind, or else as the mean.
    """

    shares: tuple[int, ...] | dict[str, int] | str  # text: a list, `2,2,2,15`

    def __post_init__(self) -> None:
        if isinstance(self.shares, str):
            try:
                listed = tuple(int(part) for part in self.shares.split(","))
            except ValueError:
                raise ConfigError("shares", f"expected 2,2,2,15, got {self.shares!r}") from None
            msgspec.structs.force_setattr(self, "shares", listed)
        given = self._figures()
        require(len(given) > 0 and max(given) > 0, "shares", "give each worker its samples")
        require(min(given) >= 0, "shares", f"must not be negative, got {min(given)}")

    def seat(self, memory: Memory | None, fleet: Fleet, batch: int) -> tuple[Memory, Move]:
        """The shares as given, checked; or in their proportion, once the fleet is another one."""
        if memory is None:
            given = self._given(fleet)
            self._check(given, fleet, batch)
            return _remember(fleet, given), (given, "as given")
        weight = self._weights(memory, fleet)
        as_given = weight.astype(np.int64)
        if (as_given == weight).all() and hold(as_given, batch, fleet.lower, fleet.upper):
            return memory, (as_given, "as given")
        speed = np.maximum(weight / weight.max(), NEXT_TO_NOTHING)
        shares = in_proportion(speed, batch, fleet.lower, fleet.upper)
        why = f"the given shares add up to {weight.sum():.4g} of {batch} here: taken as proportions"
        return memory, (shares, why)

    def next(
        self, memory: Memory, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[Memory, Move | None]:
        """The same shares, whatever was measured."""
        _, move = self.seat(memory, fleet, batch)
        return memory, None if (move[0] == shares).all() else move

    def _figures(self) -> list[int]:
        given = self.shares
        assert not isinstance(given, str)
        return list(given.values() if isinstance(given, dict) else given)

    def _given(self, fleet: Fleet) -> IntArray:
        """The share of every worker of the first fleet; all must be foreseen."""
        if not isinstance(self.shares, dict):
            if len(fleet) < len(self._figures()):
                raise PausedError(f"shares are given for {len(self._figures())} workers")
            return np.array(self._figures(), dtype=np.int64)
        rows = []
        for worker, kind in zip(fleet.ids, fleet.kinds, strict=True):
            share = self.shares.get(worker, self.shares.get(kind))
            if share is None:
                raise ConfigError("shares", f"none for {worker} or its kind, {kind}")
            rows.append(share)
        return np.array(rows, dtype=np.int64)

    def _check(self, given: IntArray, fleet: Fleet, batch: int) -> None:
        num, total = len(given), int(given.sum())
        require(
            num == len(fleet), "shares", f"{num} given for {len(fleet)} workers; give each its own"
        )
        require(
            total == batch,
            "shares",
            f"add up to {total}, the batch is {batch}; change one or the other",
        )
        outside = (given < fleet.lower) | (given > fleet.upper)
        i = int(outside.argmax())
        require(
            not outside.any(),
            "shares",
            f"{given[i]} for {fleet.ids[i]}, which holds {fleet.lower[i]} to {fleet.upper[i]}",
        )

    def _weights(self, memory: Memory, fleet: Fleet) -> FloatArray:
        named = self.shares if isinstance(self.shares, dict) else {}
        rows = []
        for worker, kind in zip(fleet.ids, fleet.kinds, strict=True):
            own = memory.by_id.get(worker, named.get(worker, named.get(kind)))
            rows.append(memory.by_kind.get(kind, memory.mean) if own is None else own)
        weight = np.array(rows, dtype=np.float64)
        return weight if weight.max() > 0 else np.ones_like(weight)


def _remember(fleet: Fleet, given: IntArray) -> Memory:
    kinds = np.array(fleet.kinds)
    return Memory(
        by_id=dict(zip(fleet.ids, given.tolist(), strict=True)),
        by_kind={k: float(given[kinds == k].mean()) for k in sorted(set(fleet.kinds))},
        mean=float(given.mean()),
    )
