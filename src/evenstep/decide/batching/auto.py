"""`auto`, the default: fit each worker's curve as it trains, solve the min-max on the curves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenstep.decide.curves import FlatLinear
from evenstep.decide.points import Points, blank, learn, lend, likeness, mixed, news, reseat
from evenstep.decide.seat import rated_speed
from evenstep.decide.split import check_bounds, in_proportion, split, water_fill
from evenstep.errors import ConfigError
from evenstep.ports import Move
from evenstep.types import SHORTEST_S, Fleet, FloatArray, IntArray, Outcome, listed

SURE = 3.0
"""Standard deviations of noise beyond which a forecast is believed to tell of a change."""

PAYS_WITHIN = 100
"""Steps within which larger shares than ever must have made up for their first step."""

SLACK, MOST_SLACK = 0.6, 0.5
"""Left to chance for each deviation of noise and factor of e in speed; at most, as a log."""

FARTHEST = 7.0
"""Log of the largest change a forecast may tell of: a thousandfold."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """The points, the curves through them, and the change a forecast told of (log of a factor)."""

    points: Points
    curves: FlatLinear
    foreseen: FloatArray


class Auto(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The default policy. Its settings are for experiments: none needs to be set."""

    start: str = "static"  # or uniform
    fixed_fraction: float = 0.1  # of a step's time, believed to be fixed until measured
    noise: float = 0.03  # relative sd of a step, believed until measured
    worth: float = 0.002  # least relative gain that is worth a new plan
    probe_cost: float = 0.0025  # time spent on looking again at workers that get nothing

    def __post_init__(self) -> None:
        if self.start not in ("static", "uniform"):
            raise ConfigError("start", f"must be static or uniform, got {self.start!r}")
        for name in ("fixed_fraction", "noise", "worth", "probe_cost"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise ConfigError(name, f"must lie in (0, 1), got {value}")

    def seat(self, memory: Memory | None, fleet: Fleet, batch: int) -> tuple[Memory, Move]:
        """Known workers by their curves, new ones by their kind's, their warm-up or their label."""
        check_bounds(batch, fleet.lower, fleet.upper)
        points = reseat(memory.points if memory else blank(self.noise), fleet, self.noise)
        curves = self._curves(points, fleet, batch)
        memory = Memory(points=points, curves=curves, foreseen=np.zeros(len(fleet)))
        if points.known.any():
            shares = split(curves, batch, _least(points, fleet, batch), fleet.upper)
            return memory, (shares, "by the curves so far")
        if self.start == "uniform":
            return memory, (water_fill(batch, fleet.lower, fleet.upper), "equal shares to start")
        shares = in_proportion(rated_speed(fleet), batch, fleet.lower, fleet.upper)
        return memory, (shares, "by label to start")

    def next(
        self, memory: Memory, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[Memory, Move | None]:
        """The min-max split of the curves, where it gains more than noise could feign."""
        points = learn(*_explain(memory, outcome), outcome)
        if not points.known.any():
            return memory, None
        if not memory.points.known.any():  # the very first step pays for everything: too early
            return replace(memory, points=points, curves=self._curves(points, fleet, batch)), None
        lent = lend(points, fleet, batch)
        curves = lent.curves(self.fixed_fraction)
        foreseen = _foresee(memory.curves, curves, points, outcome)
        memory = Memory(points=points, curves=curves, foreseen=foreseen)
        at = _equal_share(outcome)
        alike = likeness(points, curves, fleet, at)
        coming = curves.scaled(np.exp(foreseen + alike + self._slack(points, curves.seconds(at))))
        reach = _reach(coming, lent, fleet, shares)
        upper = reach if int(reach.sum()) >= batch else fleet.upper
        least = _least(points, fleet, batch)
        best = _paid_off(coming, points, batch, least, upper)
        # Who has a sample only to be seen is not what the others are measured by.
        counts = (best > least) | (least == fleet.lower)
        best_s = float(coming.seconds(best).max(where=counts, initial=SHORTEST_S))
        due = self._due(coming, points, fleet, best, best_s)
        if due.any() and int((least + due).sum()) <= batch:
            best = split(coming, batch, least + due, upper)
        look = due | ((shares == 0) & ~counts)
        if look.any():
            names = listed([fleet.ids[i] for i in np.flatnonzero(look)])
            return memory, (best, f"a look at {names}, idle so far")
        now = coming.seconds(shares)
        slowest = int(now.argmax())
        # One worker's bad luck looks like a gain.
        doubt = float(np.sqrt(points.doubt[slowest]))
        if best_s >= now[slowest] * (1.0 - self.worth - doubt):
            return memory, None
        name, late_s = fleet.ids[slowest], now[slowest]
        return memory, (best, f"{name} would be last, after {late_s:.4g} s: now {best_s:.4g} s")

    def _curves(self, points: Points, fleet: Fleet, batch: int) -> FlatLinear:
        return lend(points, fleet, batch).curves(self.fixed_fraction)

    def pace(self, memory: Memory, fleet: Fleet, outcome: Outcome) -> FloatArray:
        """Speed at an equal share: what a worker's own share does to its speed is left out."""
        at = _equal_share(outcome)
        expected_s = memory.curves.seconds(np.maximum(outcome.samples, 1))
        ignored = news(memory.points, memory.curves, outcome).ignored
        slowdown = np.where(ignored, 1.0, outcome.compute_s / expected_s)
        return at / (memory.curves.seconds(at) * slowdown)

    def _slack(self, points: Points, level_s: FloatArray) -> FloatArray:
        """What is left to chance, for each worker: log of a factor by which it counts as slower.

        Steps scatter, and the last worker of each counts. Shares are best where a sample moved from
        one worker to another changes nothing on average: where everyone is the last in proportion
        to its speed. For extreme-value noise that is a shift by its scale, times the log of speed.
        """
        believed = self.noise**2 / (points.steady + 1.0)  # what is left of it beside the measured
        noise = np.sqrt(np.maximum(points.noise - believed, 0.0))
        slower = np.log(level_s / level_s.min())
        return np.asarray(np.minimum(SLACK * noise * slower, MOST_SLACK))

    def _due(
        self, curves: FlatLinear, points: Points, fleet: Fleet, best: IntArray, best_s: float
    ) -> NDArray[np.bool_]:
        """The idle workers whose turn it is to be looked at, paid from the time saved since.

        A look costs the step as much as its slowest sample takes longer, so that all whose sample
        takes no longer are looked at along with it.
        """
        idle = (best == 0) & (fleet.upper > 0)
        extra_s = np.maximum(curves.seconds(np.ones_like(best)) - best_s, 0.0)
        turn = idle & (points.unseen >= np.maximum(20.0, extra_s / (self.probe_cost * best_s)))
        return np.asarray(idle & (extra_s <= extra_s.max(where=turn, initial=-1.0)))


def _explain(memory: Memory, outcome: Outcome) -> tuple[Points, FlatLinear]:
    """Points and curves as the step shows them, if a change that was in the air explains it.

    Either the one that a forecast told of has come, or the last one was a pause and is over.
    """
    changes = np.stack([np.zeros(len(memory.foreseen)), memory.foreseen, -memory.points.jump])
    measured = np.isfinite(outcome.compute_s)
    if not changes[1:, measured].any():
        return memory.points, memory.curves
    expected_s = memory.curves.seconds(np.maximum(outcome.samples, 1))
    error = np.log(np.where(measured, outcome.compute_s, expected_s) / expected_s)
    best = np.abs(error - changes).argmin(axis=0)
    change = np.where(measured, changes[best, np.arange(len(best))], 0.0)
    points = memory.points.rescaled(change)
    jumped = measured & (points.jump != 0)
    points = replace(points, fickle=mixed(points.fickle, over=best == 2, of=jumped))
    return points, memory.curves.scaled(np.exp(change))


def _foresee(
    before: FlatLinear, curves: FlatLinear, points: Points, outcome: Outcome
) -> FloatArray:
    """Log of each worker's change in the coming step, 0 where no forecast tells of one.

    The forecast was made on the curves `before` this step. It is carried over to those after it at
    the share that was measured, where both stand on the same ground.
    """
    told = outcome.forecast_samples_per_s
    told = np.where(np.isfinite(told) & (told > 0), told, np.nan)
    at = _equal_share(outcome)
    measured = np.where(np.isfinite(outcome.compute_s), outcome.samples, at)
    moved = np.log(before.seconds(measured)) - np.log(curves.seconds(measured))
    change = np.log(at / before.seconds(at)) - np.log(told) + moved
    sure = np.isfinite(change) & (np.abs(change) > SURE * np.sqrt(points.noise))
    return np.where(sure, np.clip(change, -FARTHEST, FARTHEST), 0.0)


def _equal_share(outcome: Outcome) -> IntArray:
    """The share at which forecasts speak of a worker's speed."""
    num = len(outcome.samples)
    return np.full(num, max(1, int(outcome.samples.sum()) // num), dtype=np.int64)


def _least(points: Points, fleet: Fleet, batch: int) -> IntArray:
    """Lower bounds, with a sample for those who must not be judged yet: idle, they never could be.

    The fixed part of a worker seen at one share, or at none, is but a belief, unless that share was
    a single sample; one that has just changed may only have paused.
    """
    believed = ((points.weight > 0).sum(axis=1) <= 1) & (points.most_seen() != 1)
    unsure = believed | (points.jump != 0)
    lower = np.where(unsure, np.clip(1, fleet.lower, fleet.upper), fleet.lower)
    return lower if int(lower.sum()) <= batch else fleet.lower


def _paid_off(
    curves: FlatLinear, points: Points, batch: int, least: IntArray, upper: IntArray
) -> IntArray:
    """The best shares; of those that every worker has had before, if more would not pay."""
    best = split(curves, batch, least, upper)
    had = np.maximum(np.minimum(points.most.astype(np.int64), upper), least)
    price = np.expm1(points.toll.max(where=best > had, initial=0.0))
    if price <= 0.0 or int(had.sum()) < batch:
        return best
    known = split(curves, batch, least, had)
    best_s, known_s = curves.seconds(best).max(), curves.seconds(known).max()
    return known if known_s - best_s <= best_s * price / PAYS_WITHIN else best


def _reach(curves: FlatLinear, points: Points, fleet: Fleet, shares: IntArray) -> IntArray:
    """How far beyond what was seen a share may go: far along a line, less from a flat part."""
    most = np.maximum(np.maximum(points.most_seen(), shares), 1.0)
    slope = curves.per_sample_s * most / curves.seconds(np.ceil(most).astype(np.int64))
    reach = np.ceil(most * (2.0 + 6.0 * np.minimum(slope, 1.0))).astype(np.int64)
    return np.clip(reach, fleet.lower, fleet.upper)
