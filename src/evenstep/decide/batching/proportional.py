"""`proportional`: dynamic batching's closed loop, a proportional controller on compute times."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from evenstep.decide.batching.ceiling import Ceilings, Speeds
from evenstep.decide.batching.rules import (
    hold,
    measured_speed,
    relative_change,
    require,
    seconds_at,
    working_bounds,
)
from evenstep.decide.seat import carry, expected_speed, follow
from evenstep.decide.split import in_proportion
from evenstep.ports import Move
from evenstep.types import Fleet, FloatArray, IntArray, Outcome, WorkerId

NOISE = 0.05
"""Relative deviation of a step's time that is expected before any was seen."""

VARIANCE_RATE = 0.1
"""Weight of the newest deviation in the estimate of noise."""

JUDGED_AFTER = 5
"""Reports at a share before its throughput is compared with that at another."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """What the controller remembers of each worker; `seconds` begins anew at every change."""

    ids: tuple[WorkerId, ...]
    shares: IntArray  # those that `seconds` belongs to
    seconds: FloatArray  # smoothed time of the share; NaN: no report since the last change
    reports: FloatArray  # how many are in it
    samples_per_s: FloatArray  # last known, over all changes
    variance: FloatArray  # of one time at an unchanged share, relative
    usual_variance: float  # the same, of most workers and over all changes
    ceilings: Ceilings


class Proportional(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`b' = b - X (mu - mean mu)` with `X = b / mu`, applied when it is worth it.

    In the paper's order: smooth the times since the last change, apply eqs. 4 and 5, clamp, and
    change all shares or none by the dead-band. Clamping and the renormalisation that the rule
    needs (it does not conserve the sum) are one operation: what a bound cuts off goes to the
    others in proportion to their candidates.
    """

    start: str = "static"  # or uniform
    smoothing: float = 0.3  # weight of the newest time; the paper gives no figure
    dead_band: float = 0.05  # shares are kept while none would change by more than this part
    min_reports: int = 1  # steps between two changes; the paper looks every step
    drop: float = 0.05  # part of a throughput whose loss, beyond noise, sets an upper bound

    def __post_init__(self) -> None:
        require(
            self.start in ("static", "uniform"),
            "start",
            f"must be static or uniform, got {self.start!r}",
        )
        require(0 < self.smoothing <= 1, "smoothing", f"must lie in (0, 1], got {self.smoothing}")
        require(0 <= self.dead_band < 1, "dead_band", f"must lie in [0, 1), got {self.dead_band}")
        require(self.min_reports >= 1, "min_reports", f"must be 1 or more, got {self.min_reports}")
        require(0 < self.drop < 1, "drop", f"must lie in (0, 1), got {self.drop}")

    def seat(self, memory: Memory | None, fleet: Fleet, batch: int) -> tuple[Memory, Move]:
        """First shares by label or all equal; those of a changed fleet by the speeds known."""
        size = len(fleet)
        lower, upper = working_bounds(fleet, batch)
        speed, variance = np.full(size, np.nan), np.full(size, NOISE**2)
        ceilings, why = Ceilings.none(size), f"{self.start} start"
        if memory is not None:
            rows = follow(memory.ids, fleet.ids)
            speed = carry(memory.samples_per_s, rows)
            variance = carry(memory.variance, rows, NOISE**2)
            ceilings, upper = memory.ceilings.follow(rows).within(batch, lower, upper)
            why = f"in proportion to speed, known of {np.isfinite(speed).sum()} of {size} workers"
        elif self.start == "uniform":
            speed = np.ones(size)
        shares = in_proportion(expected_speed(fleet, speed), batch, lower, upper)
        memory = Memory(
            ids=fleet.ids,
            shares=shares,
            seconds=np.full(size, np.nan),
            reports=np.zeros(size),
            samples_per_s=np.full(size, np.nan) if memory is None else speed,
            variance=variance,
            usual_variance=NOISE**2 if memory is None else memory.usual_variance,
            ceilings=ceilings,
        )
        return memory, (shares, why)

    def next(
        self, memory: Memory, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[Memory, Move | None]:
        """The controller's shares, if any of them is off by more than the dead-band."""
        memory = self._smooth(_restart(memory, shares), outcome)
        sure = memory.reports >= JUDGED_AFTER
        endless = (2.0 - self.smoothing) / self.smoothing  # reports that a moving average is worth
        worth = np.clip(memory.reports, 1.0, endless)
        speeds = Speeds(
            now=np.where(outcome.samples == shares, measured_speed(outcome), np.nan),
            mean=np.where(sure, memory.samples_per_s, np.nan),
            reports=worth,
            sd=np.sqrt(np.maximum(memory.variance, memory.usual_variance)),
        )
        ceilings = memory.ceilings.judged(shares, speeds, self.drop)
        lower, most = working_bounds(fleet, batch)
        ceilings, upper = ceilings.within(batch, lower, most)
        memory = replace(memory, ceilings=ceilings)

        speed = memory.samples_per_s
        if not np.isfinite(speed).all():
            speed = expected_speed(fleet, speed)
        mu = shares / speed
        candidate = shares - speed * (mu - mu.mean())
        # Nothing but rounding can make it fall to zero: it is `speed` times the mean time.
        candidate = np.maximum(candidate, 1e-9)
        wanted = in_proportion(candidate, batch, lower, upper)
        even = _before_rounding(candidate, wanted, lower, upper)
        change = np.where(wanted == shares, 0.0, relative_change(shares, even))
        i = int(change.argmax())
        if hold(shares, batch, lower, upper) and (
            change[i] <= self.dead_band or memory.reports.max() < self.min_reports
        ):
            return memory, None

        ratio = max(shares[i], 0.5) / max(even[i], 0.5)
        why = f"{max(ratio, 1 / ratio):.2f}x {'slower' if ratio >= 1 else 'faster'} than the mean"
        if wanted[i] == upper[i] < most[i]:
            why = "less productive with more"
        ceilings = ceilings.after(shares, wanted, speed, worth, sure)
        memory = replace(_restart(memory, wanted), ceilings=ceilings)
        return memory, (wanted, f"{fleet.ids[i]} is {why}: {shares[i]} -> {wanted[i]}")

    def _smooth(self, memory: Memory, outcome: Outcome) -> Memory:
        """One step more in the moving averages."""
        new_s, old_s = seconds_at(memory.shares, outcome), memory.seconds
        off = new_s - old_s
        both = np.isfinite(off)
        first = np.where(np.isnan(old_s), new_s, old_s)
        seconds = np.where(both, old_s + self.smoothing * off, first)
        with np.errstate(invalid="ignore"):
            spread = memory.variance + VARIANCE_RATE * ((off / old_s) ** 2 - memory.variance)
        now = measured_speed(outcome)
        usual = _usual_variance(now, memory.samples_per_s, memory.usual_variance)
        speed = np.where(np.isfinite(seconds), memory.shares / seconds, now)
        return replace(
            memory,
            seconds=seconds,
            reports=memory.reports + np.isfinite(new_s),
            samples_per_s=np.where(np.isfinite(speed), speed, memory.samples_per_s),
            variance=np.where(both, np.minimum(spread, 1.0), memory.variance),
            usual_variance=memory.usual_variance + VARIANCE_RATE * (usual - memory.usual_variance),
        )


def _usual_variance(now: FloatArray, known: FloatArray, otherwise: float) -> float:
    """How much the median worker's speed differs from what was known of it, as a variance.

    Where shares change at every step there is nothing else to tell noise by; and one worker that
    really changes does not move the median.
    """
    off = np.abs(np.log(now / known))
    off = np.sort(off[np.isfinite(off)])
    if len(off) == 0:
        return otherwise
    sd = float(off[(len(off) - 1) // 2]) / 0.67
    return min(sd * sd / 2.0, 1.0)  # half: both speeds are measured


def _before_rounding(
    candidate: FloatArray, shares: IntArray, lower: IntArray, upper: IntArray
) -> FloatArray:
    """What was rounded to `shares`: a sample more or less is no reason to change a small share."""
    free = (lower < shares) & (shares < upper)
    if not free.any():
        return shares.astype(np.float64)
    scale = float(shares[free].sum() / candidate[free].sum())
    return np.clip(candidate * scale, lower, upper)


def _restart(memory: Memory, shares: IntArray) -> Memory:
    """The memory for these shares: averages begin anew unless they are of the same shares."""
    if np.array_equal(memory.shares, shares):
        return memory
    blank = np.full(len(shares), np.nan)
    return replace(memory, shares=shares, seconds=blank, reports=np.zeros(len(shares)))
