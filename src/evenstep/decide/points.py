"""What is remembered of each worker's step times, and what one more step says about it.

Each worker has a few points (share, seconds). A step that does not fit them has one of two
meanings. At a share seen before, the *worker* has changed: all its points are rescaled, so that one
step tells the whole new curve. At a new share, the *curve* was wrong: the point is added. A curve
can be wrong by no more than the share has moved, or so; what lies beyond is a change.

But a step of more samples than a worker ever had pays for what it needs the first time: memory,
kernels that are chosen or compiled. Its delay is that toll, until the next step says otherwise.
And of a worker whose changes mostly were over in the next step, that one is waited for too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from evenstep.decide.curves import FlatLinear
from evenstep.decide.fit import fit
from evenstep.decide.seat import carry, expected_speed, follow
from evenstep.types import Fleet, FloatArray, IntArray, Outcome, WorkerId

SLOTS = 8
"""Points kept of a worker: enough for a flat part and a line, and old ones make room."""

NEAR = 0.06
"""Shares this near each other, relatively, are one point; less where noise hides less."""

SURE = 5.0
"""Standard deviations of noise beyond which a step is news."""

FADE, FADE_CHANGED = 0.98, 0.3
"""What a point's weight keeps over a step, and over a change of its worker."""

FICKLE_RATE = 0.3
"""Weight of the latest change in the part of them that were soon over: the second one decides."""

DRIFT_RATE = 0.07
"""Weight of the newest error in what tells drift from noise: noise often lasts a few steps."""

ALIKE = 2.0
"""Standard errors up to which workers of one kind are taken for alike."""

BELIEF_SD = 0.3
"""How sure the belief about a step's fixed part is, as a standard deviation of the fraction."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Points:
    """One row a worker; slots of weight 0 are empty."""

    ids: tuple[WorkerId, ...]
    share: FloatArray
    seconds: FloatArray
    weight: FloatArray
    noise: FloatArray  # relative variance of a step around the curve
    bias: FloatArray  # smoothed relative error, and its size: their ratio tells drift from noise
    spread: FloatArray
    steady: FloatArray  # steps measured since the worker last changed
    unseen: FloatArray  # steps since one last told of it
    most: FloatArray  # the largest share it ever had
    toll: FloatArray  # log of the factor by which the first step of a larger share takes longer
    fickle: FloatArray  # part of its changes that were over in the next step, of late
    held: FloatArray  # 1: its last step may have been such a one, and counts for nothing yet
    jump: FloatArray  # log of the factor by which its last step changed it, mostly 0

    @property
    def known(self) -> NDArray[np.bool_]:
        """Who was ever measured."""
        return np.asarray((self.weight > 0).any(axis=1))

    @property
    def doubt(self) -> FloatArray:
        """Relative variance of each worker's level: the less it was seen, the less it is known."""
        return np.asarray(self.noise / (np.minimum(self.steady, self.weight.sum(axis=1)) + 1.0))

    def curves(self, fixed_fraction: float) -> FlatLinear:
        """The curves through the points, by relative error: noise is a fraction of a step."""
        level_s = self.seconds[np.arange(len(self.ids)), self.weight.argmax(axis=1)]
        relative = np.where(self.weight > 0, self.seconds / level_s[:, None], 1.0)
        unit = fit(
            self.share,
            relative,
            self.weight / relative**2,
            fixed_fraction=fixed_fraction,
            belief=self.noise / BELIEF_SD**2,
            knee_error=SURE * self.noise,
        )
        return unit.scaled(level_s)

    def most_seen(self) -> FloatArray:
        """The largest share remembered of each worker."""
        most: FloatArray = np.where(self.weight > 0, self.share, 0.0).max(axis=1)
        return most

    def rescaled(self, log_factor: FloatArray) -> Points:
        """The points of workers that take `exp(log_factor)` times as long."""
        return replace(self, seconds=self.seconds * np.exp(log_factor)[:, None])


def blank(noise: float) -> Points:
    """Points of nobody."""
    none, no_points = np.zeros(0), np.zeros((0, SLOTS))
    return Points(
        ids=(),
        share=no_points,
        seconds=no_points,
        weight=no_points,
        noise=none + noise**2,
        bias=none,
        spread=none,
        steady=none,
        unseen=none,
        most=none,
        toll=none,
        fickle=none,
        held=none,
        jump=none,
    )


def reseat(points: Points, fleet: Fleet, noise: float) -> Points:
    """The points of another fleet: those who stay keep theirs, others take up those of their kind.

    What is taken up weighs less than what is measured. A kind that is new, or was seen at one share
    only, has nothing to pass on.
    """
    rows = follow(points.ids, fleet.ids)
    new = {"noise": noise**2, "spread": noise}
    columns = [f.name for f in fields(Points) if f.name != "ids"]
    kept = {name: carry(getattr(points, name), rows, new.get(name, 0.0)) for name in columns}
    points = Points(ids=fleet.ids, **kept)
    donors = _middle_of_kinds(points, fleet, (points.weight > 0).sum(axis=1) > 1)
    known = points.known
    row = [i if known[i] else donors.get(kind, i) for i, kind in enumerate(fleet.kinds)]
    fade = np.where(known, 1.0, FADE_CHANGED)[:, None]
    return replace(
        points,
        share=points.share[row],
        seconds=points.seconds[row],
        weight=points.weight[row] * fade,
    )


def lend(points: Points, fleet: Fleet, batch: int) -> Points:
    """The points, with a guess for workers that have none: at an equal share, by what is known.

    That is the speed of its kind, its own warm-up, or its label.
    """
    if points.known.all():
        return points
    measured = np.where(points.known, _speed(points), np.nan)
    speed = expected_speed(fleet, measured)
    share, seconds, weight = points.share.copy(), points.seconds.copy(), points.weight.copy()
    blank = ~points.known
    share[blank, 0], weight[blank, 0] = batch / len(fleet), 1.0
    seconds[blank, 0] = share[blank, 0] / speed[blank]
    return replace(points, share=share, seconds=seconds, weight=weight)


def likeness(points: Points, curves: FlatLinear, fleet: Fleet, at: IntArray) -> FloatArray:
    """What makes workers of one kind alike that noise may have set apart (log of a factor each).

    Within `ALIKE` standard errors they become alike; what is far beyond stays as it is.
    """
    level, doubt, known = np.log(curves.seconds(at)), points.doubt, points.known
    numbers: dict[str, int] = {}
    kind = [numbers.setdefault(name, len(numbers)) for name in fleet.kinds]
    weight = np.where(known, 1.0 / doubt, 0.0)
    mean = np.bincount(kind, weight * level) / np.maximum(np.bincount(kind, weight), 1e-12)
    apart = np.where(known, level - mean[kind], 0.0)
    explained = ALIKE**2 * doubt / np.maximum(apart**2, 1e-12)
    return np.asarray(-apart * np.minimum(1.0, explained))


def _speed(points: Points) -> FloatArray:
    """Samples per second at each worker's best known share; meaningless where there is none."""
    at = np.arange(len(points.ids)), points.weight.argmax(axis=1)
    return np.asarray(points.share[at] / np.where(points.seconds[at] > 0, points.seconds[at], 1.0))


def _middle_of_kinds(points: Points, fleet: Fleet, usable: NDArray[np.bool_]) -> dict[str, int]:
    """For each kind the row of its worker of middle speed, among those usable."""
    alike: dict[str, list[int]] = {}
    for i in np.argsort(_speed(points), kind="stable").tolist():
        if usable[i]:
            alike.setdefault(fleet.kinds[i], []).append(i)
    return {kind: rows[len(rows) // 2] for kind, rows in alike.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class News:
    """A step beside what was expected of it."""

    error: FloatArray  # log of the factor by which it took longer, 0 where that cannot be said
    slot: IntArray  # the nearest point, and how far it is
    away: FloatArray
    surprise: NDArray[np.bool_]  # neither noise nor a wrong curve explain it
    late: NDArray[np.bool_]  # the toll of a larger share does
    doubted: NDArray[np.bool_]  # it may well be over in the next step

    @property
    def ignored(self) -> NDArray[np.bool_]:
        """Whose step says nothing of the next, or not yet."""
        return self.late | self.doubted


def news(points: Points, expected: FlatLinear, outcome: Outcome) -> News:
    """What a step says; `expected` are the curves that it was planned on."""
    old = points.known & np.isfinite(outcome.compute_s)
    share = np.where(old, outcome.samples, 1)
    error = np.log(np.where(old, outcome.compute_s, 1.0) / expected.seconds(share))
    error = np.where(old, error, 0.0)
    slot, away = _nearest(points, share.astype(np.float64))
    surprise = old & (np.abs(error) > away + SURE * np.sqrt(points.noise))
    late = surprise & (error > 0) & (share > points.most)
    doubted = surprise & ~late & (points.fickle > 0.5) & (points.held == 0)
    return News(error=error, slot=slot, away=away, surprise=surprise, late=late, doubted=doubted)


def learn(points: Points, expected: FlatLinear, outcome: Outcome) -> Points:
    """The points with one more step in them; `expected` are the curves that it was planned on."""
    step = news(points, expected, outcome)
    measured = np.isfinite(outcome.compute_s)
    seen = measured & ~step.ignored
    old = seen & points.known
    share = np.where(measured, outcome.samples, 1).astype(np.float64)
    took_s = np.where(measured, outcome.compute_s, 1.0)
    error, slot, surprise = np.where(old, step.error, 0.0), step.slot, step.surprise & old
    sigma = np.sqrt(points.noise)
    near = old & (step.away < np.minimum(NEAR, 2.0 * sigma))

    # The first step at a new share may pay for the change: of two times there the shorter counts.
    again = near & surprise & (error < 0) & (points.weight[np.arange(len(slot)), slot] <= 1.0)
    changed = surprise & ~again
    calm = near & ~surprise
    steady = np.where(changed, 0.0, points.steady) + seen
    rate = np.maximum(1.0 / (points.steady + 2.0), 0.05)
    # Of a mean the step's own scatter is told along with it: the next step may be told by itself.
    scatter = error**2 + np.where(calm, outcome.spread_s / took_s, 0.0) ** 2
    noise = points.noise + np.where(calm, rate * (scatter - points.noise), 0.0)
    bias = points.bias + np.where(calm, DRIFT_RATE * (error - points.bias), 0.0)
    spread = points.spread + np.where(calm, DRIFT_RATE * (np.abs(error) - points.spread), 0.0)

    # Errors that lean to one side are drift: follow them. Errors of both signs average out.
    leaning = np.clip(3.0 * np.abs(bias) / np.maximum(spread, 1e-12) - 2.0, 0.0, 1.0)
    gain = np.where(calm, np.maximum(1.0 / (steady + 1.0), leaning), 0.0)
    rescaled = points.rescaled(np.where(changed, 1.0, gain) * error)
    fade = np.where(changed, FADE_CHANGED, np.where(seen, FADE, 1.0))
    grown = measured & points.known & (share > points.most)
    tolled = np.where(
        grown, 0.5 * (points.toll + np.where(step.late, step.error, 0.0)), points.toll
    )
    tolled = np.where(changed & (points.unseen > 0), 0.0, tolled)  # the last step was a change too
    after = replace(
        rescaled,
        weight=points.weight * fade[:, None],
        noise=np.maximum(noise, 1e-6),
        bias=np.where(changed, 0.0, bias),
        spread=np.where(changed, sigma, spread),
        steady=steady,
        unseen=np.where(seen, 0.0, points.unseen + 1.0),
        most=np.where(measured, np.maximum(points.most, share), points.most),
        fickle=mixed(points.fickle, over=seen & ~surprise, of=seen & (points.held > 0)),
        held=np.where(measured, step.ignored, points.held),
        toll=np.where(again, np.maximum(tolled, -error), tolled),
        jump=np.where(changed, error, np.where(seen, 0.0, points.jump)),
    )
    slot = np.where(near, slot, after.weight.argmin(axis=1))
    return _put(after, seen & ~(near & ~again), near & ~again, slot, share, took_s)


def mixed(fickle: FloatArray, *, over: NDArray[np.bool_], of: NDArray[np.bool_]) -> FloatArray:
    """The part of changes that were soon over, with the latest `of` them that were, or not."""
    return np.where(of, fickle + FICKLE_RATE * (over - fickle), fickle)


def _nearest(points: Points, share: FloatArray) -> tuple[IntArray, FloatArray]:
    """Each worker's slot whose share is the nearest, and how far it is (log; inf: none)."""
    used = points.weight > 0
    apart = np.abs(np.log(np.where(used, points.share, 1.0) / share[:, None]))
    apart = np.where(used, apart, np.inf)
    slot = apart.argmin(axis=1)
    return slot, apart[np.arange(len(slot)), slot]


def _put(
    points: Points,
    new: NDArray[np.bool_],
    more: NDArray[np.bool_],
    slot: IntArray,
    share: FloatArray,
    took_s: FloatArray,
) -> Points:
    """A measured point into its slot: in place of what is there, or averaged with it."""
    shares, seconds, weight = points.share.copy(), points.seconds.copy(), points.weight.copy()
    i = np.flatnonzero(new)
    at = i, slot[i]
    shares[at], seconds[at], weight[at] = share[i], took_s[i], 1.0
    i = np.flatnonzero(more)
    at = i, slot[i]
    weight[at] += 1.0
    shares[at] += (share[i] - shares[at]) / weight[at]
    seconds[at] += (took_s[i] - seconds[at]) / weight[at]
    return replace(points, share=shares, seconds=seconds, weight=weight)
