"""`fixed`: shares given by hand, such as 2,2,2,15."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from evenstep.decide.batching.rules import is_valid, require
from evenstep.decide.split import in_proportion
from evenstep.errors import ConfigError, PausedError
from evenstep.ports import Move
from evenstep.types import Fleet, FloatArray, IntArray, Outcome, WorkerId

ZERO_SHARE_WEIGHT = 1e-12
"""Relative weight of a share of 0: it gets a sample only if no other worker has capacity."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FixedState:
    """The shares as assigned to the first fleet."""

    by_id: dict[WorkerId, int]
    by_kind: dict[str, float]  # mean share
    mean: float


class Fixed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares set by the user, kept while the fleet is the one they were given for.

    A list is in the order of worker ids; a mapping names workers or kinds, and a worker's own name
    takes precedence. After a membership change the same numbers serve as proportions; a worker
    without one counts as the mean of its kind, or else of all workers.
    """

    shares: tuple[int, ...] | dict[str, int] | str  # text: a list, `2,2,2,15`

    def __post_init__(self) -> None:
        if isinstance(self.shares, str):
            try:
                parsed = tuple(int(part) for part in self.shares.split(","))
            except ValueError:
                raise ConfigError("shares", f"expected 2,2,2,15, got {self.shares!r}") from None
            msgspec.structs.force_setattr(self, "shares", parsed)
        given = self._numbers()
        require(len(given) > 0 and max(given) > 0, "shares", "give at least one worker a share")
        require(min(given) >= 0, "shares", f"must not be negative, got {min(given)}")

    def first_shares(
        self, memory: FixedState | None, fleet: Fleet, batch: int
    ) -> tuple[FixedState, Move]:
        """The given shares, checked; proportional to them once the fleet has changed."""
        if memory is None:
            given = self._given(fleet)
            self._check(given, fleet, batch)
            return _assigned(fleet, given), (given, "as given")
        weight = self._weights(memory, fleet)
        as_given = weight.astype(np.int64)
        if (as_given == weight).all() and is_valid(as_given, batch, fleet.lower, fleet.upper):
            return memory, (as_given, "as given")
        speed = np.maximum(weight / weight.max(), ZERO_SHARE_WEIGHT)
        shares = in_proportion(speed, batch, fleet.lower, fleet.upper)
        why = f"given shares add up to {weight.sum():.4g}, not {batch}: used as proportions"
        return memory, (shares, why)

    def next(
        self, memory: FixedState, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[FixedState, Move | None]:
        """The same shares, regardless of measurements."""
        _, move = self.first_shares(memory, fleet, batch)
        return memory, None if (move[0] == shares).all() else move

    def _numbers(self) -> list[int]:
        given = self.shares
        assert not isinstance(given, str)
        return list(given.values() if isinstance(given, dict) else given)

    def _given(self, fleet: Fleet) -> IntArray:
        """The share of every worker of the first fleet; each must have one."""
        if not isinstance(self.shares, dict):
            numbers = self._numbers()
            if len(fleet) < len(numbers):
                raise PausedError(f"waiting for {len(numbers)} workers, one for each share")
            return np.array(numbers, dtype=np.int64)
        rows = []
        for worker, kind in zip(fleet.ids, fleet.kinds, strict=True):
            share = self.shares.get(worker, self.shares.get(kind))
            if share is None:
                raise ConfigError("shares", f"no share for {worker} or its kind, {kind}; add one")
            rows.append(share)
        return np.array(rows, dtype=np.int64)

    def _check(self, given: IntArray, fleet: Fleet, batch: int) -> None:
        num, total = len(given), int(given.sum())
        require(num == len(fleet), "shares", f"{num} for {len(fleet)} workers; give one per worker")
        require(
            total == batch,
            "shares",
            f"add up to {total}, but the batch is {batch}; change one of them",
        )
        outside = (given < fleet.lower) | (given > fleet.upper)
        i = int(outside.argmax())
        require(
            not outside.any(),
            "shares",
            f"{given[i]} for {fleet.ids[i]}, which allows {fleet.lower[i]} to {fleet.upper[i]}",
        )

    def _weights(self, memory: FixedState, fleet: Fleet) -> FloatArray:
        named = self.shares if isinstance(self.shares, dict) else {}
        rows = []
        for worker, kind in zip(fleet.ids, fleet.kinds, strict=True):
            own = memory.by_id.get(worker, named.get(worker, named.get(kind)))
            rows.append(memory.by_kind.get(kind, memory.mean) if own is None else own)
        weight = np.array(rows, dtype=np.float64)
        return weight if weight.max() > 0 else np.ones_like(weight)


def _assigned(fleet: Fleet, given: IntArray) -> FixedState:
    kinds = np.array(fleet.kinds)
    return FixedState(
        by_id=dict(zip(fleet.ids, given.tolist(), strict=True)),
        by_kind={k: float(given[kinds == k].mean()) for k in sorted(set(fleet.kinds))},
        mean=float(given.mean()),
    )
