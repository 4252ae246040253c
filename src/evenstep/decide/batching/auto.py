"""`auto`, the default: fit each worker's step-time curve online, solve the min-max split."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from evenstep.decide.batching.rules import check_start
from evenstep.decide.carry_over import rated_speed
from evenstep.decide.curve_points import CurvePoints, learn, residuals, shrink_to_kind
from evenstep.decide.curves import FlatLinear, Mask
from evenstep.decide.split import check_bounds, in_proportion, split, water_fill
from evenstep.errors import ConfigError
from evenstep.ports import Move
from evenstep.types import SHORTEST_S, Fleet, FloatArray, IntArray, Outcome, listed

FORECAST_SIGMAS = 3.0
"""Standard deviations of noise beyond which a forecast change is believed."""

PAYBACK_STEPS = 100
"""Steps within which larger shares than ever must have repaid their warm-up cost."""

SLACK, MAX_SLACK = 0.6, 0.5
"""Log-slowdown margin per unit of noise sigma and log speed ratio; capped at MAX_SLACK."""

MAX_FORECAST_CHANGE = 7.0
"""Log of the largest change taken from a forecast: a thousandfold."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AutoState:
    """The points, the curves through them, and the forecast log change of each worker."""

    points: CurvePoints
    curves: FlatLinear
    forecast_change: FloatArray


class Auto(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The default policy. Its settings are for experiments; none needs to be set."""

    start: str = "static"  # or uniform
    fixed_fraction: float = 0.1  # prior for the fixed part of a step's time
    noise: float = 0.03  # prior for the relative standard deviation of a step's time
    worth: float = 0.002  # smallest relative gain that justifies a new plan
    probe_cost: float = 0.0025  # fraction of time to spend on probing idle workers

    def __post_init__(self) -> None:
        check_start(self.start)
        for name in ("fixed_fraction", "noise", "worth", "probe_cost"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise ConfigError(name, f"must lie in (0, 1), got {value}")

    def first_shares(
        self, memory: AutoState | None, fleet: Fleet, batch: int
    ) -> tuple[AutoState, Move]:
        """Shares by the known curves; new workers by their kind, warm-up or rated speed."""
        check_bounds(batch, fleet.lower, fleet.upper)
        before = memory.points if memory else CurvePoints.empty()
        points = before.carried_over(fleet, self.noise)
        curves = self._curves(points, fleet, batch)
        memory = AutoState(points=points, curves=curves, forecast_change=np.zeros(len(fleet)))
        if points.known.any():
            shares = split(curves, batch, _lower_bounds(points, fleet, batch), fleet.upper)
            return memory, (shares, "by the curves fitted so far")
        if self.start == "uniform":
            return memory, (water_fill(batch, fleet.lower, fleet.upper), "equal shares to start")
        shares = in_proportion(rated_speed(fleet), batch, fleet.lower, fleet.upper)
        return memory, (shares, "by rated speed to start")

    def next(
        self, memory: AutoState, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[AutoState, Move | None]:
        """The min-max split of the curves, if it gains more than noise could explain."""
        points = learn(*_expected(memory, outcome), outcome)
        if not points.known.any():
            return memory, None
        if not memory.points.known.any():  # the very first step includes all warm-up: wait
            return replace(memory, points=points, curves=self._curves(points, fleet, batch)), None
        guessed = points.with_guesses(fleet, batch)
        curves = guessed.curves(self.fixed_fraction)
        change = _forecast_change(memory.curves, curves, points, outcome)
        memory = AutoState(points=points, curves=curves, forecast_change=change)
        at = _equal_share(outcome)
        shrink = shrink_to_kind(points, curves, fleet, at)
        coming = curves.scaled(np.exp(change + shrink + self._slack(points, curves.seconds(at))))
        limit = _limit(coming, guessed, fleet, shares)
        upper = limit if int(limit.sum()) >= batch else fleet.upper
        lower = _lower_bounds(points, fleet, batch)
        best = _worth_warmup(coming, points, batch, lower, upper)
        # A worker that gets one sample only to be measured does not count as the slowest.
        counts = (best > lower) | (lower == fleet.lower)
        best_s = float(coming.seconds(best).max(where=counts, initial=SHORTEST_S))
        due = self._due_probes(coming, points, fleet, best, best_s)
        if due.any() and int((lower + due).sum()) <= batch:
            best = split(coming, batch, lower + due, upper)
        probed = due | ((shares == 0) & ~counts)
        if probed.any():
            names = listed([fleet.ids[i] for i in np.flatnonzero(probed)])
            return memory, (best, f"probe {names}, idle so far")
        now_s = coming.seconds(shares)
        slowest = int(now_s.argmax())
        # A gain within the standard error of the slowest worker may be noise.
        error = float(np.sqrt(points.level_var[slowest]))
        if best_s >= now_s[slowest] * (1.0 - self.worth - error):
            return memory, None
        name, slowest_s = fleet.ids[slowest], now_s[slowest]
        return memory, (best, f"{name} is slowest: expected step {slowest_s:.4g} -> {best_s:.4g} s")

    def curves(self, memory: AutoState) -> FlatLinear:
        """As fitted so far; of a worker that is not measured yet, a guess."""
        return memory.curves

    def _curves(self, points: CurvePoints, fleet: Fleet, batch: int) -> FlatLinear:
        return points.with_guesses(fleet, batch).curves(self.fixed_fraction)

    def pace(self, memory: AutoState, fleet: Fleet, outcome: Outcome) -> FloatArray:
        """Speed at an equal share, so that moves of the worker's own share do not show in it."""
        at = _equal_share(outcome)
        expected_s = memory.curves.seconds(np.maximum(outcome.samples, 1))
        ignored = residuals(memory.points, memory.curves, outcome).ignored
        slowdown = np.where(ignored, 1.0, outcome.compute_s / expected_s)
        return at / (memory.curves.seconds(at) * slowdown)

    def _slack(self, points: CurvePoints, level_s: FloatArray) -> FloatArray:
        """Log slowdown that gives slow workers slightly less, so that they straggle less often.

        With noisy steps, shares are optimal if moving a sample from one worker to another leaves
        the expected maximum unchanged: if each is the slowest with a probability proportional to
        its speed. For extreme-value noise that is a shift by its scale times the log speed ratio.
        """
        prior_var = self.noise**2 / (points.steps_since_change + 1.0)  # still in the estimate
        sigma = np.sqrt(np.maximum(points.noise_var - prior_var, 0.0))
        log_ratio = np.log(level_s / level_s.min())
        return np.asarray(np.minimum(SLACK * sigma * log_ratio, MAX_SLACK))

    def _due_probes(
        self, curves: FlatLinear, points: CurvePoints, fleet: Fleet, best: IntArray, best_s: float
    ) -> Mask:
        """Idle workers to probe with one sample, as often as `probe_cost` allows.

        A step is delayed by its slowest probe only, so workers with a cheaper probe join it.
        """
        idle = (best == 0) & (fleet.upper > 0)
        extra_s = np.maximum(curves.seconds(np.ones_like(best)) - best_s, 0.0)
        interval = np.maximum(20.0, extra_s / (self.probe_cost * best_s))
        due = idle & (points.steps_since_learned >= interval)
        return np.asarray(idle & (extra_s <= extra_s.max(where=due, initial=-1.0)))


def _expected(memory: AutoState, outcome: Outcome) -> tuple[CurvePoints, FlatLinear]:
    """Points and curves that the step was expected to follow.

    Of three hypotheses per worker the one closest to the step wins: no change, the forecast change,
    or the end of a transient change in the step before.
    """
    change, jump = memory.forecast_change, memory.points.last_jump
    changes = np.stack([np.zeros(len(change)), change, -jump])
    measured = np.isfinite(outcome.compute_s)
    if not changes[1:, measured].any():
        return memory.points, memory.curves
    expected_s = memory.curves.seconds(np.maximum(outcome.samples, 1))
    error = np.log(np.where(measured, outcome.compute_s, expected_s) / expected_s)
    best = np.abs(error - changes).argmin(axis=0)
    change = np.where(measured, changes[best, np.arange(len(best))], 0.0)
    points = memory.points.rescaled(change)
    jumped = measured & (jump != 0)
    rate = points.transient_rate_after(best == 2, jumped)
    points = replace(points, transient_rate=rate)
    return points, memory.curves.scaled(np.exp(change))


def _forecast_change(
    before: FlatLinear, curves: FlatLinear, points: CurvePoints, outcome: Outcome
) -> FloatArray:
    """Log change of each worker's step time in the next step, 0 without a significant forecast.

    The forecast refers to the curves `before` this step. It is converted to the current `curves` at
    the measured share, where the two are comparable.
    """
    at = _equal_share(outcome)
    measured = np.where(np.isfinite(outcome.compute_s), outcome.samples, at)
    moved = np.log(before.seconds(measured)) - np.log(curves.seconds(measured))
    change = np.log(at / before.seconds(at)) - np.log(outcome.forecast_samples_per_s) + moved
    threshold = FORECAST_SIGMAS * np.sqrt(points.noise_var)
    clipped = np.clip(change, -MAX_FORECAST_CHANGE, MAX_FORECAST_CHANGE)
    return np.where(np.isfinite(change) & (np.abs(change) > threshold), clipped, 0.0)


def _equal_share(outcome: Outcome) -> IntArray:
    """An equal share for every worker: forecasts refer to the speed at it."""
    num = len(outcome.samples)
    return np.full(num, max(1, int(outcome.samples.sum()) // num), dtype=np.int64)


def _lower_bounds(points: CurvePoints, fleet: Fleet, batch: int) -> IntArray:
    """Lower bounds, with one sample for workers that must be measured before they may idle.

    The fixed cost of a worker measured at fewer than two shares is only the prior (unless that
    share was a single sample), and a worker that has just changed may recover in the next step.
    """
    only_prior = ((points.weight > 0).sum(axis=1) <= 1) & (points.largest_point() != 1)
    uncertain = only_prior | (points.last_jump != 0)
    lower = np.where(uncertain, np.clip(1, fleet.lower, fleet.upper), fleet.lower)
    return lower if int(lower.sum()) <= batch else fleet.lower


def _worth_warmup(
    curves: FlatLinear, points: CurvePoints, batch: int, lower: IntArray, upper: IntArray
) -> IntArray:
    """The best shares, without larger ones than ever if these would not repay their warm-up."""
    best = split(curves, batch, lower, upper)
    warm = np.maximum(np.minimum(points.max_share.astype(np.int64), upper), lower)
    cost = np.expm1(points.warmup_cost.max(where=best > warm, initial=0.0))
    if cost <= 0.0 or int(warm.sum()) < batch:
        return best
    best_warm = split(curves, batch, lower, warm)
    best_s, warm_s = curves.seconds(best).max(), curves.seconds(best_warm).max()
    return best_warm if warm_s - best_s <= best_s * cost / PAYBACK_STEPS else best


def _limit(curves: FlatLinear, points: CurvePoints, fleet: Fleet, shares: IntArray) -> IntArray:
    """How far a share may be extrapolated: far along a line, less far from a flat part."""
    largest = np.maximum(np.maximum(points.largest_point(), shares), 1.0)
    elasticity = curves.per_sample_s * largest / curves.seconds(np.ceil(largest).astype(np.int64))
    limit = np.ceil(largest * (2.0 + 6.0 * np.minimum(elasticity, 1.0))).astype(np.int64)
    return np.clip(limit, fleet.lower, fleet.upper)
