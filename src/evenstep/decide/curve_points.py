"""Measured points of each worker's step-time curve, and how one more step updates them.

Each worker has a few points (share, seconds). If a step does not fit them, one of two things has
happened. At a share measured before, the *worker* has changed: all its points are rescaled, so one
step updates the whole curve. At a new share, the *curve* was wrong: the point is added. A curve can
be wrong by about as much as the share has moved; any larger error is a change of the worker.

Two exceptions. The first step of a share larger than ever pays a warm-up cost (memory allocation,
kernel selection or compilation), so a delay in it is ignored until the next step confirms it. And
if a worker's past changes were mostly transient, wait one step before believing a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from evenstep.decide.carry_over import carry_over, expected_speed, previous_rows
from evenstep.decide.curves import FlatLinear, Mask
from evenstep.decide.fit import fit
from evenstep.types import Fleet, FloatArray, IntArray, Outcome, WorkerId

SLOTS = 8
"""Points kept per worker: enough for a flat part and a line; the lightest is replaced first."""

SAME_SHARE = 0.06
"""Shares closer than this, relatively, are one point; less if noise is small."""

SURPRISE_SIGMAS = 5.0
"""Standard deviations of noise beyond which a step is a surprise."""

DECAY, DECAY_ON_CHANGE = 0.98, 0.3
"""Factor on a point's weight per step, and when its worker changes."""

TRANSIENT_GAIN = 0.3
"""EWMA gain of the transient rate: two transient changes in a row bring it above one half."""

DRIFT_GAIN = 0.07
"""EWMA gain of the errors that tell drift from noise; low, since noise often lasts a few steps."""

ALIKE_SIGMAS = 2.0
"""Standard errors within which workers of one kind count as equal."""

PRIOR_SD = 0.3
"""Standard deviation of the prior on the fixed fraction of a step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CurvePoints:
    """One row per worker; slots of weight 0 are empty."""

    ids: tuple[WorkerId, ...]
    share: FloatArray
    seconds: FloatArray
    weight: FloatArray
    noise_var: FloatArray  # relative variance of a step around the curve
    error_ewma: FloatArray  # of the relative error; its ratio to the next tells drift from noise
    abs_error_ewma: FloatArray
    steps_since_change: FloatArray  # steps measured since the worker last changed
    steps_since_learned: FloatArray  # steps since the last one that updated the points
    max_share: FloatArray  # the largest share the worker ever had
    warmup_cost: FloatArray  # log slowdown of the first step at a larger share than ever
    transient_rate: FloatArray  # EWMA: fraction of changes that were over in the next step
    unconfirmed: FloatArray  # 1: the last step was ignored until the next one confirms it
    last_jump: FloatArray  # log factor by which the last step changed the worker, mostly 0

    @classmethod
    def empty(cls) -> CurvePoints:
        """The points of an empty fleet."""
        slots = dict.fromkeys(("share", "seconds", "weight"), np.zeros((0, SLOTS)))
        return cls(ids=(), **(dict.fromkeys(_column_names(), np.zeros(0)) | slots))

    @property
    def known(self) -> Mask:
        """Which workers have points."""
        return np.asarray((self.weight > 0).any(axis=1))

    @property
    def level_var(self) -> FloatArray:
        """Relative variance of each worker's estimated level; falls with the steps measured."""
        num_steps = np.minimum(self.steps_since_change, self.weight.sum(axis=1)) + 1.0
        return np.asarray(self.noise_var / num_steps)

    def curves(self, fixed_fraction: float) -> FlatLinear:
        """Curves of least relative error through the points: noise is proportional to time."""
        level_s = self.seconds[np.arange(len(self.ids)), self.weight.argmax(axis=1)]
        relative = np.where(self.weight > 0, self.seconds / level_s[:, None], 1.0)
        unit = fit(
            self.share,
            relative,
            self.weight / relative**2,
            fixed_fraction=fixed_fraction,
            prior_weight=self.noise_var / PRIOR_SD**2,
            knee_penalty=SURPRISE_SIGMAS * self.noise_var,
        )
        return unit.scaled(level_s)

    def largest_point(self) -> FloatArray:
        """The largest share among each worker's points."""
        largest: FloatArray = np.where(self.weight > 0, self.share, 0.0).max(axis=1)
        return largest

    def rescaled(self, log_factor: FloatArray) -> CurvePoints:
        """The points of workers that take `exp(log_factor)` times as long."""
        return replace(self, seconds=self.seconds * np.exp(log_factor)[:, None])

    def carried_over(self, fleet: Fleet, noise: float) -> CurvePoints:
        """The points for a new fleet: known workers keep theirs, joiners inherit from their kind.

        Inherited points weigh less than measured ones. A kind that is new, or was measured at one
        share only, has no curve to pass on.
        """
        rows = previous_rows(self.ids, fleet.ids)
        fill = {"noise_var": noise**2, "abs_error_ewma": noise}
        columns = {n: carry_over(getattr(self, n), rows, fill.get(n, 0.0)) for n in _column_names()}
        points = CurvePoints(ids=fleet.ids, **columns)
        donors = _median_of_kinds(points, fleet, (points.weight > 0).sum(axis=1) > 1)
        known = points.known
        row = [i if known[i] else donors.get(kind, i) for i, kind in enumerate(fleet.kinds)]
        decay = np.where(known, 1.0, DECAY_ON_CHANGE)[:, None]
        return replace(
            points,
            share=points.share[row],
            seconds=points.seconds[row],
            weight=points.weight[row] * decay,
        )

    def with_guesses(self, fleet: Fleet, batch: int) -> CurvePoints:
        """The points, with one guess at an equal share for each worker without any.

        The guess follows `expected_speed`: its kind, its own warm-up, or its rated speed.
        """
        if self.known.all():
            return self
        measured = np.where(self.known, _speed(self), np.nan)
        speed = expected_speed(fleet, measured)
        share, seconds, weight = self.share.copy(), self.seconds.copy(), self.weight.copy()
        empty = ~self.known
        share[empty, 0], weight[empty, 0] = batch / len(fleet), 1.0
        seconds[empty, 0] = share[empty, 0] / speed[empty]
        return replace(self, share=share, seconds=seconds, weight=weight)

    def transient_rate_after(self, was_transient: Mask, observed: Mask) -> FloatArray:
        """The transient rate, updated where the outcome of a change was `observed`."""
        rate = self.transient_rate
        return np.where(observed, rate + TRANSIENT_GAIN * (was_transient - rate), rate)


def _column_names() -> list[str]:
    return [f.name for f in fields(CurvePoints) if f.name != "ids"]


def shrink_to_kind(
    points: CurvePoints, curves: FlatLinear, fleet: Fleet, at: IntArray
) -> FloatArray:
    """Log factors that shrink each worker's level towards the mean of its kind.

    Within `ALIKE_SIGMAS` standard errors a level becomes the mean; far beyond, it stays.
    """
    level, level_var, known = np.log(curves.seconds(at)), points.level_var, points.known
    numbers: dict[str, int] = {}
    kind = [numbers.setdefault(name, len(numbers)) for name in fleet.kinds]
    weight = np.where(known, 1.0 / level_var, 0.0)
    mean = np.bincount(kind, weight * level) / np.maximum(np.bincount(kind, weight), 1e-12)
    deviation = np.where(known, level - mean[kind], 0.0)
    explained = ALIKE_SIGMAS**2 * level_var / np.maximum(deviation**2, 1e-12)
    return np.asarray(-deviation * np.minimum(1.0, explained))


def _speed(points: CurvePoints) -> FloatArray:
    """Samples per second at each worker's heaviest point; meaningless for a worker without any."""
    at = np.arange(len(points.ids)), points.weight.argmax(axis=1)
    return np.asarray(points.share[at] / np.where(points.seconds[at] > 0, points.seconds[at], 1.0))


def _median_of_kinds(points: CurvePoints, fleet: Fleet, usable: Mask) -> dict[str, int]:
    """For each kind, the row of its usable worker of median speed."""
    by_kind: dict[str, list[int]] = {}
    for i in np.argsort(_speed(points), kind="stable").tolist():
        if usable[i]:
            by_kind.setdefault(fleet.kinds[i], []).append(i)
    return {kind: rows[len(rows) // 2] for kind, rows in by_kind.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Residuals:
    """One step compared with the curves it was planned on."""

    error: FloatArray  # log(actual / expected) time, 0 where there is no expectation
    slot: IntArray  # nearest point, and its distance as the log of a share ratio
    distance: FloatArray
    surprise: Mask  # explained neither by noise nor by a wrong curve
    warmup: Mask  # a surprise that is probably the warm-up cost of a larger share
    doubted: Mask  # a surprise of a worker whose changes rarely last

    @property
    def ignored(self) -> Mask:
        """Steps that must be confirmed by the next one before they count."""
        return self.warmup | self.doubted


def residuals(points: CurvePoints, expected: FlatLinear, outcome: Outcome) -> Residuals:
    """How a step deviates from `expected`, the curves it was planned on."""
    comparable = points.known & np.isfinite(outcome.compute_s)
    share = np.where(comparable, outcome.samples, 1)
    error = np.log(np.where(comparable, outcome.compute_s, 1.0) / expected.seconds(share))
    error = np.where(comparable, error, 0.0)
    slot, distance = _nearest(points, share.astype(np.float64))
    sigma = np.sqrt(points.noise_var)
    surprise = comparable & (np.abs(error) > distance + SURPRISE_SIGMAS * sigma)
    warmup = surprise & (error > 0) & (share > points.max_share)
    doubted = surprise & ~warmup & (points.transient_rate > 0.5) & (points.unconfirmed == 0)
    return Residuals(
        error=error, slot=slot, distance=distance, surprise=surprise, warmup=warmup, doubted=doubted
    )


def learn(points: CurvePoints, expected: FlatLinear, outcome: Outcome) -> CurvePoints:
    """The points updated by one step; `expected` are the curves it was planned on."""
    step = residuals(points, expected, outcome)
    measured = np.isfinite(outcome.compute_s)
    learned = measured & ~step.ignored
    old = learned & points.known
    share = np.where(measured, outcome.samples, 1).astype(np.float64)
    took_s = np.where(measured, outcome.compute_s, 1.0)
    error, slot, surprise = np.where(old, step.error, 0.0), step.slot, step.surprise & old
    sigma = np.sqrt(points.noise_var)
    near = old & (step.distance < np.minimum(SAME_SHARE, 2.0 * sigma))

    # The first step at a new share may include warm-up: if the second is faster, it replaces it.
    redone = near & surprise & (error < 0) & (points.weight[np.arange(len(slot)), slot] <= 1.0)
    changed = surprise & ~redone
    calm = near & ~surprise
    steps_since_change = np.where(changed, 0.0, points.steps_since_change) + learned
    gain = np.maximum(1.0 / (points.steps_since_change + 2.0), 0.05)
    # A report may average several steps: add their scatter, since the next may be a single step.
    variance = error**2 + np.where(calm, outcome.spread_s / took_s, 0.0) ** 2
    noise_var = points.noise_var + np.where(calm, gain * (variance - points.noise_var), 0.0)
    bias = points.error_ewma + np.where(calm, DRIFT_GAIN * (error - points.error_ewma), 0.0)
    growth = np.where(calm, DRIFT_GAIN * (np.abs(error) - points.abs_error_ewma), 0.0)
    size = points.abs_error_ewma + growth

    # Errors of mostly one sign are drift and are followed; errors of both signs average out.
    drift = np.clip(3.0 * np.abs(bias) / np.maximum(size, 1e-12) - 2.0, 0.0, 1.0)
    level_gain = np.where(calm, np.maximum(1.0 / (steps_since_change + 1.0), drift), 0.0)
    rescaled = points.rescaled(np.where(changed, 1.0, level_gain) * error)
    decay = np.where(changed, DECAY_ON_CHANGE, np.where(learned, DECAY, 1.0))
    grown = measured & points.known & (share > points.max_share)
    observed_cost = np.where(step.warmup, step.error, 0.0)
    warmup_cost = np.where(grown, 0.5 * (points.warmup_cost + observed_cost), points.warmup_cost)
    # The delay persists, so the ignored step before was a change too, not warm-up.
    warmup_cost = np.where(changed & (points.steps_since_learned > 0), 0.0, warmup_cost)
    confirms = learned & (points.unconfirmed > 0)
    updated = replace(
        rescaled,
        weight=points.weight * decay[:, None],
        noise_var=np.maximum(noise_var, 1e-6),
        error_ewma=np.where(changed, 0.0, bias),
        abs_error_ewma=np.where(changed, sigma, size),
        steps_since_change=steps_since_change,
        steps_since_learned=np.where(learned, 0.0, points.steps_since_learned + 1.0),
        max_share=np.where(measured, np.maximum(points.max_share, share), points.max_share),
        transient_rate=points.transient_rate_after(learned & ~surprise, confirms),
        unconfirmed=np.where(measured, step.ignored, points.unconfirmed),
        warmup_cost=np.where(redone, np.maximum(warmup_cost, -error), warmup_cost),
        last_jump=np.where(changed, error, np.where(learned, 0.0, points.last_jump)),
    )
    slot = np.where(near, slot, updated.weight.argmin(axis=1))
    return _store(updated, learned & ~(near & ~redone), near & ~redone, slot, share, took_s)


def _nearest(points: CurvePoints, share: FloatArray) -> tuple[IntArray, FloatArray]:
    """Each worker's slot with the nearest share, and its distance (log ratio; inf: no points)."""
    used = points.weight > 0
    distance = np.abs(np.log(np.where(used, points.share, 1.0) / share[:, None]))
    distance = np.where(used, distance, np.inf)
    slot = distance.argmin(axis=1)
    return slot, distance[np.arange(len(slot)), slot]


def _store(
    points: CurvePoints,
    replaced: Mask,
    averaged: Mask,
    slot: IntArray,
    share: FloatArray,
    took_s: FloatArray,
) -> CurvePoints:
    """Store the measured point in its slot: `replaced` by it, or `averaged` with it."""
    shares, seconds, weight = points.share.copy(), points.seconds.copy(), points.weight.copy()
    i = np.flatnonzero(replaced)
    at = i, slot[i]
    shares[at], seconds[at], weight[at] = share[i], took_s[i], 1.0
    i = np.flatnonzero(averaged)
    at = i, slot[i]
    weight[at] += 1.0
    shares[at] += (share[i] - shares[at]) / weight[at]
    seconds[at] += (took_s[i] - seconds[at]) / weight[at]
    return replace(points, share=shares, seconds=seconds, weight=weight)
