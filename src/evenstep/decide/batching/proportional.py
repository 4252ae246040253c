"""`proportional`: dynamic batching's closed loop, a proportional controller on compute times."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from evenstep.decide.batching.ceiling import Ceilings, Speeds
from evenstep.decide.batching.rules import (
    check_start,
    is_valid,
    measured_speed,
    relative_change,
    require,
    seconds_at,
    working_bounds,
)
from evenstep.decide.carry_over import carry_over, expected_speed, previous_rows
from evenstep.decide.split import in_proportion
from evenstep.ports import Move
from evenstep.types import Fleet, FloatArray, IntArray, Outcome, WorkerId

NOISE = 0.05
"""Prior relative standard deviation of a step's time."""

VARIANCE_GAIN = 0.1
"""EWMA gain of the variance estimates."""

MIN_REPORTS_TO_COMPARE = 5
"""Reports at a share before its throughput is compared with another share's."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProportionalState:
    """The controller's state; `seconds` and `reports` restart at every change of shares."""

    ids: tuple[WorkerId, ...]
    shares: IntArray  # the shares that `seconds` was measured at
    seconds: FloatArray  # EWMA of the step time; NaN: no report since the last change
    reports: FloatArray  # number of reports in it
    samples_per_s: FloatArray  # last known speed, kept across changes
    variance: FloatArray  # relative variance of a step time at an unchanged share
    median_variance: float  # the same for the median worker, kept across changes
    ceilings: Ceilings


class Proportional(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`b' = b - X (mu - mean mu)` with `X = b / mu`, applied outside a dead-band.

    In the paper's order: smooth the times since the last change, apply eqs. 4 and 5, clamp, and
    change all shares or none by the dead-band. The rule does not conserve the sum: clamping and
    renormalising are one operation, in which samples cut off by a bound go to the other workers
    in proportion to their candidates.
    """

    start: str = "static"  # or uniform
    smoothing: float = 0.3  # EWMA gain of step times; the paper gives no value
    dead_band: float = 0.05  # keep the shares if none would change by more, relatively
    min_reports: int = 1  # steps between two changes; the paper allows one every step
    drop: float = 0.05  # relative throughput loss, beyond noise, that sets an upper bound

    def __post_init__(self) -> None:
        check_start(self.start)
        require(0 < self.smoothing <= 1, "smoothing", f"must lie in (0, 1], got {self.smoothing}")
        require(0 <= self.dead_band < 1, "dead_band", f"must lie in [0, 1), got {self.dead_band}")
        require(self.min_reports >= 1, "min_reports", f"must be 1 or more, got {self.min_reports}")
        require(0 < self.drop < 1, "drop", f"must lie in (0, 1), got {self.drop}")

    def first_shares(
        self, memory: ProportionalState | None, fleet: Fleet, batch: int
    ) -> tuple[ProportionalState, Move]:
        """First shares by rated speed or equal; after a fleet change, by known speeds."""
        size = len(fleet)
        lower, upper = working_bounds(fleet, batch)
        speed, variance = np.full(size, np.nan), np.full(size, NOISE**2)
        ceilings, why = Ceilings.none(size), f"{self.start} start"
        if memory is not None:
            rows = previous_rows(memory.ids, fleet.ids)
            speed = carry_over(memory.samples_per_s, rows)
            variance = carry_over(memory.variance, rows, NOISE**2)
            ceilings, upper = memory.ceilings.carried_over(rows).apply(batch, lower, upper)
            why = f"by speed, known for {np.isfinite(speed).sum()} of {size} workers"
        elif self.start == "uniform":
            speed = np.ones(size)
        shares = in_proportion(expected_speed(fleet, speed), batch, lower, upper)
        memory = ProportionalState(
            ids=fleet.ids,
            shares=shares,
            seconds=np.full(size, np.nan),
            reports=np.zeros(size),
            samples_per_s=np.full(size, np.nan) if memory is None else speed,
            variance=variance,
            median_variance=NOISE**2 if memory is None else memory.median_variance,
            ceilings=ceilings,
        )
        return memory, (shares, why)

    def next(
        self,
        memory: ProportionalState,
        fleet: Fleet,
        batch: int,
        shares: IntArray,
        outcome: Outcome,
    ) -> tuple[ProportionalState, Move | None]:
        """The controller's shares, if any of them leaves the dead-band."""
        memory = self._smooth(_restart(memory, shares), outcome)
        reliable = memory.reports >= MIN_REPORTS_TO_COMPARE
        ewma_size = (2.0 - self.smoothing) / self.smoothing  # effective sample size of the EWMA
        num_reports = np.clip(memory.reports, 1.0, ewma_size)
        speeds = Speeds(
            now=np.where(outcome.samples == shares, measured_speed(outcome), np.nan),
            mean=np.where(reliable, memory.samples_per_s, np.nan),
            reports=num_reports,
            sd=np.sqrt(np.maximum(memory.variance, memory.median_variance)),
        )
        ceilings = memory.ceilings.judged(shares, speeds, self.drop)
        lower, hard_upper = working_bounds(fleet, batch)
        ceilings, upper = ceilings.apply(batch, lower, hard_upper)
        memory = replace(memory, ceilings=ceilings)

        speed = memory.samples_per_s
        if not np.isfinite(speed).all():
            speed = expected_speed(fleet, speed)
        mu = shares / speed
        candidate = shares - speed * (mu - mu.mean())
        # It equals `speed` times the mean time: only rounding can bring it to zero.
        candidate = np.maximum(candidate, 1e-9)
        wanted = in_proportion(candidate, batch, lower, upper)
        exact = _before_rounding(candidate, wanted, lower, upper)
        change = np.where(wanted == shares, 0.0, relative_change(shares, exact))
        i = int(change.argmax())
        if is_valid(shares, batch, lower, upper) and (
            change[i] <= self.dead_band or memory.reports.max() < self.min_reports
        ):
            return memory, None

        ratio = max(shares[i], 0.5) / max(exact[i], 0.5)
        why = f"{max(ratio, 1 / ratio):.2f}x {'slower' if ratio >= 1 else 'faster'} than the mean"
        if wanted[i] == upper[i] < hard_upper[i]:
            why = "slower per sample above its bound"
        ceilings = ceilings.with_raises(shares, wanted, speed, num_reports, reliable)
        memory = replace(_restart(memory, wanted), ceilings=ceilings)
        return memory, (wanted, f"{fleet.ids[i]} is {why}: {shares[i]} -> {wanted[i]}")

    def _smooth(self, memory: ProportionalState, outcome: Outcome) -> ProportionalState:
        """Update the moving averages with one step."""
        new_s, old_s = seconds_at(memory.shares, outcome), memory.seconds
        error = new_s - old_s
        both = np.isfinite(error)
        first = np.where(np.isnan(old_s), new_s, old_s)
        seconds = np.where(both, old_s + self.smoothing * error, first)
        with np.errstate(invalid="ignore"):
            variance = memory.variance + VARIANCE_GAIN * ((error / old_s) ** 2 - memory.variance)
        now = measured_speed(outcome)
        median = memory.median_variance
        newest = _median_variance(now, memory.samples_per_s, median)
        speed = np.where(np.isfinite(seconds), memory.shares / seconds, now)
        return replace(
            memory,
            seconds=seconds,
            reports=memory.reports + np.isfinite(new_s),
            samples_per_s=np.where(np.isfinite(speed), speed, memory.samples_per_s),
            variance=np.where(both, np.minimum(variance, 1.0), memory.variance),
            median_variance=median + VARIANCE_GAIN * (newest - median),
        )


def _median_variance(now: FloatArray, known: FloatArray, default: float) -> float:
    """Variance of the median worker's speed around its last known speed.

    If shares change at every step, this is the only estimate of noise there is; and a single worker
    that really changes does not move the median.
    """
    error = np.abs(np.log(now / known))
    error = np.sort(error[np.isfinite(error)])
    if len(error) == 0:
        return default
    sd = float(error[(len(error) - 1) // 2]) / 0.67
    return min(sd * sd / 2.0, 1.0)  # half: both speeds are noisy


def _before_rounding(
    candidate: FloatArray, shares: IntArray, lower: IntArray, upper: IntArray
) -> FloatArray:
    """The values before rounding: one sample more or less must not move a small share."""
    free = (lower < shares) & (shares < upper)
    if not free.any():
        return shares.astype(np.float64)
    scale = float(shares[free].sum() / candidate[free].sum())
    return np.clip(candidate * scale, lower, upper)


def _restart(memory: ProportionalState, shares: IntArray) -> ProportionalState:
    """The state for these shares: averages restart unless the shares are unchanged."""
    if np.array_equal(memory.shares, shares):
        return memory
    nan = np.full(len(shares), np.nan)
    return replace(memory, shares=shares, seconds=nan, reports=np.zeros(len(shares)))
