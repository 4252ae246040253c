"""`shift`: LB-BSP on GPUs as of 2020, model-free: move samples from the slowest to the fastest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from evenstep.decide.batching.rules import (
    check_start,
    is_valid,
    require,
    seconds_at,
    working_bounds,
)
from evenstep.decide.carry_over import carry_over, expected_speed, previous_rows
from evenstep.decide.curves import Mask
from evenstep.decide.split import in_proportion
from evenstep.ports import Move
from evenstep.types import Fleet, FloatArray, IntArray, Outcome, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShiftState:
    """The current observation window, and the last move with the times behind it."""

    ids: tuple[WorkerId, ...]
    shares: IntArray
    total_s: FloatArray  # summed step times in the window
    reports: FloatArray  # number of reports of each worker in the window
    steps: int  # in the window so far
    window: int
    move: int  # samples per move
    roles: IntArray  # at this size of move: -1 has given, 1 has taken, 0 neither
    before: IntArray  # shares before the last move
    slowest_s: float = np.inf  # slowest worker's time with those shares
    gap_s: float = np.inf  # its distance to the fastest worker
    settled: bool = False


class Shift(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Observe a window, then move samples from the slowest worker to the fastest with capacity.

    If a worker that has taken samples would have to give some, or vice versa, the move overshot: it
    is halved and the window doubled. So a worker only gives or only takes at each size of move, and
    the search terminates. Once a single sample overshoots, the fleet is balanced and shares stay.
    It restarts if the gap between slowest and fastest grows by more than `resume` of the step. The
    paper gives the rule but no values; the ones below are our choice.
    """

    start: str = "uniform"  # or static
    window: int = 5  # initial number of steps observed before a move
    max_window: int = 40
    move: float = 0.25  # initial samples per move, relative to the mean share
    pairs: int = 1  # pairs of slowest and fastest workers per move; the paper has one
    tolerance: float = 0.01  # fraction of a step by which balanced workers may differ
    resume: float = 0.05  # fraction of a step by which the gap must grow to restart

    def __post_init__(self) -> None:
        check_start(self.start)
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

    def first_shares(
        self, memory: ShiftState | None, fleet: Fleet, batch: int
    ) -> tuple[ShiftState, Move]:
        """Shares equal or by rated speed; after a fleet change, known workers keep their ratios."""
        weight, why = np.ones(len(fleet)), f"{self.start} start"
        if memory is not None:
            rows = previous_rows(memory.ids, fleet.ids)
            kept = carry_over(np.maximum(memory.shares, 0.5), rows)
            weight = expected_speed(fleet, kept)
            why = f"{np.isfinite(kept).sum()} of {len(fleet)} workers keep their proportions"
        elif self.start == "static":
            weight = expected_speed(fleet, np.full(len(fleet), np.nan))
        shares = in_proportion(weight, batch, *working_bounds(fleet, batch))
        return self._begin(fleet, batch, shares), (shares, why)

    def next(
        self, memory: ShiftState, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[ShiftState, Move | None]:
        """At the end of a window, one move if it would help."""
        lower, upper = working_bounds(fleet, batch)
        if not is_valid(shares, batch, lower, upper):
            shares = in_proportion(np.maximum(shares, 0.5), batch, lower, upper)
            return self._begin(fleet, batch, shares), (shares, "moved within the bounds")
        if not np.array_equal(memory.shares, shares):
            memory = self._begin(fleet, batch, shares)
        memory = _observe(memory, outcome)
        if memory.steps < memory.window:
            return memory, None

        with np.errstate(invalid="ignore"):
            mean_s = memory.total_s / memory.reports  # NaN: no report in this window
        memory = _new_window(memory)
        givers, takers = self._roles(mean_s, shares > lower, shares < upper)
        if len(givers) == 0:
            return memory, None
        slowest_s = float(mean_s[givers[0]])
        gap_s = slowest_s - float(mean_s[takers[0]])
        overshot = memory.roles[givers[0]] > 0 or memory.roles[takers[0]] < 0
        if memory.settled or not overshot:
            if gap_s > memory.gap_s + self.resume * slowest_s:  # a worker changed
                memory = self._begin(fleet, batch, shares)
            elif memory.settled:
                return memory, None
        elif memory.move == 1:
            return self._settle(memory, fleet, slowest_s, gap_s)
        else:
            window = min(2 * memory.window, self.max_window)
            memory = replace(_resized(memory, memory.move // 2), window=window)
        if gap_s <= slowest_s / shares[givers[0]]:  # smaller than one sample
            memory = _resized(memory, 1)
        capacity = np.minimum(shares[givers] - lower[givers], upper[takers] - shares[takers])
        samples = np.minimum(capacity, memory.move)
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
            f"{fleet.ids[giver]} takes {slowest_s / mean_s[taker]:.2f}x as long as "
            f"{fleet.ids[taker]}: {shares[giver]} -> {moved[giver]}, "
            f"{shares[taker]} -> {moved[taker]}"
        )
        return memory, (moved, why)

    def _begin(self, fleet: Fleet, batch: int, shares: IntArray) -> ShiftState:
        """Start with a first window and the initial size of move."""
        return ShiftState(
            ids=fleet.ids,
            shares=shares,
            total_s=np.zeros(len(fleet)),
            reports=np.zeros(len(fleet)),
            steps=0,
            window=self.window,
            move=max(1, round(self.move * batch / len(fleet))),
            roles=np.zeros_like(shares),
            before=shares,
        )

    def _roles(
        self, mean_s: FloatArray, can_give: Mask, can_take: Mask
    ) -> tuple[IntArray, IntArray]:
        """The slowest that can give and the fastest that can take, in pairs that differ enough."""
        num = min(self.pairs, len(mean_s) // 2)
        measured = np.isfinite(mean_s)
        slow = np.flatnonzero(measured & can_give)
        fast = np.flatnonzero(measured & can_take)
        slow = slow[np.argsort(-mean_s[slow], kind="stable")][:num]
        fast = fast[np.argsort(mean_s[fast], kind="stable")][:num]
        num = min(len(slow), len(fast))
        slow, fast = slow[:num], fast[:num]
        if num == 0:  # for example, no worker was measured in this window
            return slow, fast
        apart = mean_s[fast] < mean_s[slow] * (1.0 - self.tolerance)
        # Beyond the first pair, only workers faster than the mean take and slower ones give.
        average_s = float(mean_s[measured].mean())
        apart[1:] &= ((mean_s[fast] < average_s) & (average_s < mean_s[slow]))[1:]
        return slow[apart], fast[apart]

    def _settle(
        self, memory: ShiftState, fleet: Fleet, slowest_s: float, gap_s: float
    ) -> tuple[ShiftState, Move | None]:
        """A single sample overshoots: keep the better of the last two shares."""
        if slowest_s <= memory.slowest_s:
            return replace(memory, gap_s=gap_s, settled=True), None
        i = int((memory.shares - memory.before).argmax())
        why = f"{fleet.ids[i]} back from {memory.shares[i]} to {memory.before[i]}"
        memory = replace(memory, shares=memory.before, settled=True)
        return memory, (memory.shares, f"balanced to one sample: {why}")


def _observe(memory: ShiftState, outcome: Outcome) -> ShiftState:
    """Add one step to the window."""
    seconds = seconds_at(memory.shares, outcome)
    measured = np.isfinite(seconds)
    return replace(
        memory,
        total_s=memory.total_s + np.where(measured, seconds, 0.0),
        reports=memory.reports + measured,
        steps=memory.steps + 1,
    )


def _resized(memory: ShiftState, move: int) -> ShiftState:
    """Change the size of moves and reset the roles."""
    if move == memory.move:
        return memory
    return replace(memory, move=move, roles=np.zeros_like(memory.roles))


def _new_window(memory: ShiftState) -> ShiftState:
    zeros = np.zeros(len(memory.ids))
    return replace(memory, total_s=zeros, reports=zeros, steps=0)
