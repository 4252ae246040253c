"""`shift`: LB-BSP on GPUs as of 2020, samples moved from the straggler to the leader, no model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenstep.decide.batching.rules import hold, require, seconds_at, working_bounds
from evenstep.decide.seat import carry, expected_speed, follow
from evenstep.decide.split import in_proportion
from evenstep.ports import Move
from evenstep.types import Fleet, FloatArray, IntArray, Outcome, WorkerId

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """The observation window so far, and the last move with what it was based on."""

    ids: tuple[WorkerId, ...]
    shares: IntArray
    total_s: FloatArray  # of the window
    times: FloatArray  # reports of each worker in it
    steps: int  # of the window so far
    window: int
    move: int  # samples
    roles: IntArray  # at this size of move: -1 has given, 1 has taken, 0 neither
    before: IntArray  # the shares before the last move
    slowest_s: float = np.inf  # with those
    gap_s: float = np.inf  # with those, to the fastest
    settled: bool = False


class Shift(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Watch a window, then move samples from the slowest worker to the fastest with room.

    When a worker that has taken would have to give, or the other way round, the move is too large
    for it: it is halved and the window doubled. So at each size of move a worker only gives or
    only takes, and moving comes to an end. When a single sample is too large the fleet is balanced
    and shares stay. A gap between slowest and fastest that grows by more than `resume` of the step
    starts all anew. The paper tells the rule but no figures; those below are our choice.
    """

    start: str = "uniform"  # or static
    window: int = 5  # steps watched before a move, at first
    max_window: int = 40
    move: float = 0.25  # samples moved at first, of the mean share
    pairs: int = 1  # slowest and fastest workers paired in one move; the paper has one
    tolerance: float = 0.01  # part of a step by which all may differ and still be balanced
    resume: float = 0.05  # part of a step by which the gap must grow by itself to start anew

    def __post_init__(self) -> None:
        require(
            self.start in ("static", "uniform"),
            "start",
            f"must be static or uniform, got {self.start!r}",
        )
        require(self.window >= 1, "window", f"must be 1 or more, got {self.window}")
        require(
            self.max_window >= self.window,
            "max_window",
            f"must be at least window, {self.window}: got {self.max_window}",
        )
        require(0 < self.move <= 1, "move", f"must lie in (0, 1], got {self.move}")
        require(self.pairs >= 1, "pairs", f"must be 1 or more, got {self.pairs}")
        require(0 <= self.tolerance < 1, "tolerance", f"must lie in [0, 1), got {self.tolerance}")
        require(0 < self.resume < 10, "resume", f"must lie in (0, 10), got {self.resume}")

    def seat(self, memory: Memory | None, fleet: Fleet, batch: int) -> tuple[Memory, Move]:
        """Equal shares, or by label; those who stay in a changed fleet keep their proportions."""
        weight, why = np.ones(len(fleet)), f"{self.start} start"
        if memory is not None:
            rows = follow(memory.ids, fleet.ids)
            kept = carry(np.maximum(memory.shares, 0.5), rows)
            weight = expected_speed(fleet, kept)
            why = f"{np.isfinite(kept).sum()} of {len(fleet)} workers keep their proportions"
        elif self.start == "static":
            weight = expected_speed(fleet, np.full(len(fleet), np.nan))
        shares = in_proportion(weight, batch, *working_bounds(fleet, batch))
        return self._begin(fleet, batch, shares), (shares, why)

    def next(
        self, memory: Memory, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[Memory, Move | None]:
        """At the end of a window, one move; or none, where none would help."""
        lower, upper = working_bounds(fleet, batch)
        if not hold(shares, batch, lower, upper):
            shares = in_proportion(np.maximum(shares, 0.5), batch, lower, upper)
            return self._begin(fleet, batch, shares), (shares, "brought within the bounds")
        if not np.array_equal(memory.shares, shares):
            memory = self._begin(fleet, batch, shares)
        memory = _watch(memory, outcome)
        if memory.steps < memory.window:
            return memory, None

        with np.errstate(invalid="ignore"):
            mean_s = memory.total_s / memory.times  # NaN: not heard of in this window
        memory = _new_window(memory)
        givers, takers = self._roles(mean_s, shares > lower, shares < upper)
        if len(givers) == 0:
            return memory, None
        slowest_s = float(mean_s[givers[0]])
        gap_s = slowest_s - float(mean_s[takers[0]])
        overshot = memory.roles[givers[0]] > 0 or memory.roles[takers[0]] < 0
        if memory.settled or not overshot:
            if gap_s > memory.gap_s + self.resume * slowest_s:  # no move of ours: they changed
                memory = self._begin(fleet, batch, shares)
            elif memory.settled:
                return memory, None
        elif memory.move == 1:
            return self._settle(memory, fleet, slowest_s, gap_s)
        else:
            window = min(2 * memory.window, self.max_window)
            memory = replace(_resized(memory, memory.move // 2), window=window)
        if gap_s <= slowest_s / shares[givers[0]]:  # less than a sample takes
            memory = _resized(memory, 1)
        room = np.minimum(shares[givers] - lower[givers], upper[takers] - shares[takers])
        samples = np.minimum(room, memory.move)
        moved = shares.copy()
        moved[givers] -= samples
        moved[takers] += samples
        memory = replace(
            memory,
            shares=moved,
            roles=np.where(moved == shares, memory.roles, np.sign(moved - shares)),
            before=shares,
            slowest_s=slowest_s,
            gap_s=gap_s,
        )
        giver, taker = givers[0], takers[0]
        why = (
            f"{fleet.ids[giver]} takes {slowest_s / mean_s[taker]:.2f}x the time of "
            f"{fleet.ids[taker]}: {shares[giver]} -> {moved[giver]}, "
            f"{shares[taker]} -> {moved[taker]}"
        )
        return memory, (moved, why)

    def _begin(self, fleet: Fleet, batch: int, shares: IntArray) -> Memory:
        """A first window, with the first size of move."""
        return Memory(
            ids=fleet.ids,
            shares=shares,
            total_s=np.zeros(len(fleet)),
            times=np.zeros(len(fleet)),
            steps=0,
            window=self.window,
            move=max(1, round(self.move * batch / len(fleet))),
            roles=np.zeros_like(shares),
            before=shares,
        )

    def _roles(
        self, mean_s: FloatArray, can_give: Mask, can_take: Mask
    ) -> tuple[IntArray, IntArray]:
        """The slowest that can give and the fastest that can take, in pairs worth a move."""
        num = min(self.pairs, len(mean_s) // 2)
        heard = np.isfinite(mean_s)
        slow = np.flatnonzero(heard & can_give)
        fast = np.flatnonzero(heard & can_take)
        slow = slow[np.argsort(-mean_s[slow], kind="stable")][:num]
        fast = fast[np.argsort(mean_s[fast], kind="stable")][:num]
        num = min(len(slow), len(fast))
        slow, fast = slow[:num], fast[:num]
        if num == 0:  # nobody was measured in this window, say
            return slow, fast
        apart = mean_s[fast] < mean_s[slow] * (1.0 - self.tolerance)
        # Beyond the first pair, no one takes who is slower than most, or gives who is faster.
        middle_s = float(mean_s[heard].mean())
        apart[1:] &= ((mean_s[fast] < middle_s) & (middle_s < mean_s[slow]))[1:]
        return slow[apart], fast[apart]

    def _settle(
        self, memory: Memory, fleet: Fleet, slowest_s: float, gap_s: float
    ) -> tuple[Memory, Move | None]:
        """One sample back and forth makes no difference: keep the better of the two."""
        if slowest_s <= memory.slowest_s:
            return replace(memory, gap_s=gap_s, settled=True), None
        i = int((memory.shares - memory.before).argmax())
        why = f"{fleet.ids[i]} is better off with {memory.before[i]} than {memory.shares[i]}"
        memory = replace(memory, shares=memory.before, settled=True)
        return memory, (memory.shares, f"balanced to the sample: {why}")


def _watch(memory: Memory, outcome: Outcome) -> Memory:
    """One step more in the window."""
    seconds = seconds_at(memory.shares, outcome)
    heard = np.isfinite(seconds)
    return replace(
        memory,
        total_s=memory.total_s + np.where(heard, seconds, 0.0),
        times=memory.times + heard,
        steps=memory.steps + 1,
    )


def _resized(memory: Memory, move: int) -> Memory:
    """Moves of another size: who gave and who took at the old one is forgotten."""
    if move == memory.move:
        return memory
    return replace(memory, move=move, roles=np.zeros_like(memory.roles))


def _new_window(memory: Memory) -> Memory:
    zeros = np.zeros(len(memory.ids))
    return replace(memory, total_s=zeros, times=zeros, steps=0)
