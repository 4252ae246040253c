"""Upper bounds learned as in dynamic batching: where more samples made a worker less productive.

The paper's rule is one line: if throughput drops after a share was raised, the share before is the
most from now on. Two things are added so that it survives noise and changing machines. The drop
must exceed what noise explains. And a bound belongs to the speed the worker had at it: if the
worker is slower than that with no more samples (or faster), then something else had slowed it down,
or it is another machine by now, and the bound is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenstep.decide.seat import carry
from evenstep.types import FloatArray, IntArray

Mask = NDArray[np.bool_]

SIGMAS = 4.0
"""A drop must exceed this many standard errors: a thousand workers are judged every step."""

STRIKES = 3
"""Steps with a clear drop after which it is believed without waiting for an average.

The controller backs off from a clear drop at once and comes back later: there may be no average.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Speeds:
    """What each worker does at its share, in samples per second."""

    now: FloatArray  # in this step; NaN: no report
    mean: FloatArray  # since the share changed; NaN: too early to say
    reports: FloatArray  # how many the mean is worth, at least 1
    sd: FloatArray  # relative, of one report


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ceilings:
    """A bound for each worker, infinite where none was learned, and raises not yet judged."""

    share: FloatArray
    speed: FloatArray  # samples per second at that share, when the bound was learned
    raised_from: FloatArray  # NaN: not on trial
    raised_speed: FloatArray  # at the share it was raised from
    raised_reports: FloatArray  # how many that rests on
    strikes: FloatArray

    @classmethod
    def none(cls, num_workers: int) -> Ceilings:
        """No bounds, nothing to judge."""
        blank = np.full(num_workers, np.nan)
        return cls(
            share=np.full(num_workers, np.inf),
            speed=blank,
            raised_from=blank,
            raised_speed=blank,
            raised_reports=blank,
            strikes=np.zeros(num_workers),
        )

    def follow(self, rows: IntArray) -> Ceilings:
        """The same for another fleet, whose shares start anew: open judgements are dropped."""
        return replace(
            Ceilings.none(len(rows)),
            share=carry(self.share, rows, np.inf),
            speed=carry(self.speed, rows),
        )

    def after(
        self, before: IntArray, after: IntArray, speed: FloatArray, reports: FloatArray, sure: Mask
    ) -> Ceilings:
        """Those whose share was raised are on trial: they did `speed` at the share `before`.

        A trial goes on while the share stays above where it was raised from, and after a strike
        in any case; it is won when the next raise starts from a share that is `sure`.
        """
        open_ = np.isfinite(self.raised_from) & (self.strikes > 0)
        goes_on = open_ | ((after > self.raised_from) & ~sure)
        new = ~goes_on & (after > before) & (before > 0)
        return replace(
            self,
            raised_from=np.where(goes_on, self.raised_from, np.where(new, before, np.nan)),
            raised_speed=np.where(new, speed, self.raised_speed),
            raised_reports=np.where(new, reports, self.raised_reports),
        )

    def judged(self, shares: IntArray, speeds: Speeds, drop: float) -> Ceilings:
        """Learn and forget by what was measured at these shares."""
        on_trial = shares > self.raised_from
        now_lost = np.log(self.raised_speed / speeds.now)
        mean_lost = np.log(self.raised_speed / speeds.mean)
        doubt = SIGMAS * speeds.sd
        strike = now_lost > drop + doubt * np.sqrt(1 / self.raised_reports + 1)
        strikes = np.where(on_trial & strike, self.strikes + 1, self.strikes)
        strikes = np.where(on_trial & (now_lost < drop), 0.0, strikes)
        clear = mean_lost > drop + doubt * np.sqrt(1 / self.raised_reports + 1 / speeds.reports)
        lost = on_trial & (clear | (strikes >= STRIKES))
        # With fewer samples a worker may be slower by its fixed cost, but takes no longer.
        least = self.speed * shares / self.share
        margin = np.exp(drop + doubt / np.sqrt(speeds.reports))
        changed = (speeds.mean > self.speed * margin) | (speeds.mean * margin < least)
        share = np.where(changed & (shares <= self.share), np.inf, self.share)
        return replace(
            self,
            share=np.where(lost, self.raised_from, share),
            speed=np.where(lost, self.raised_speed, self.speed),
            raised_from=np.where(lost, np.nan, self.raised_from),
            strikes=np.where(lost, 0.0, strikes),
        )

    def within(self, batch: int, lower: IntArray, upper: IntArray) -> tuple[Ceilings, IntArray]:
        """The upper bounds with the learned ones, which are forgotten if they leave no room."""
        bounded = np.maximum(np.minimum(upper, self.share), lower).astype(np.int64)
        if int(bounded.sum()) >= batch:
            return self, bounded
        return Ceilings.none(len(lower)), upper
