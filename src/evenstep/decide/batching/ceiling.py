"""Upper bounds learned as in dynamic batching: shares above which throughput drops.

The paper's rule is one line: if throughput drops after a share was raised, the previous share
becomes the upper bound. Two additions make it robust to noise and changing machines. The drop must
be statistically significant. And a bound is tied to the speed measured at it: if the worker later
runs slower than that at no larger share, or faster, then the machine has changed or the drop had
another cause, and the bound is removed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evenstep.decide.carry_over import carry_over
from evenstep.decide.curves import Mask
from evenstep.types import FloatArray, IntArray

SIGMAS = 4.0
"""Significance of a drop in standard errors; high, since up to 1,000 workers are tested a step."""

STRIKES = 3
"""Steps with a clear drop that suffice without an average.

The controller backs off from a clear drop at once and returns later: an average may never form.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Speeds:
    """Each worker's samples per second at its current share."""

    now: FloatArray  # in this step; NaN: no report
    mean: FloatArray  # since the share changed; NaN: too few reports
    reports: FloatArray  # effective sample size of the mean, at least 1
    sd: FloatArray  # relative standard deviation of one report


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ceilings:
    """A learned bound per worker (infinite: none), and raised shares that are still on trial."""

    share: FloatArray
    speed: FloatArray  # samples per second at that share, when the bound was learned
    raised_from: FloatArray  # the share before it was raised; NaN: not on trial
    raised_speed: FloatArray  # speed at `raised_from`, and its effective sample size
    raised_reports: FloatArray
    strikes: FloatArray  # steps with a clear drop during the trial

    @classmethod
    def none(cls, num_workers: int) -> Ceilings:
        """No bounds and no trials."""
        nan = np.full(num_workers, np.nan)
        return cls(
            share=np.full(num_workers, np.inf),
            speed=nan,
            raised_from=nan,
            raised_speed=nan,
            raised_reports=nan,
            strikes=np.zeros(num_workers),
        )

    def carried_over(self, rows: IntArray) -> Ceilings:
        """The bounds for a new fleet; trials are dropped, since all shares restart."""
        return replace(
            Ceilings.none(len(rows)),
            share=carry_over(self.share, rows, np.inf),
            speed=carry_over(self.speed, rows),
        )

    def with_raises(
        self,
        before: IntArray,
        after: IntArray,
        speed: FloatArray,
        reports: FloatArray,
        reliable: Mask,
    ) -> Ceilings:
        """Put raised shares on trial against `speed`, measured at the shares `before`.

        A trial continues while the share stays above `raised_from`, and always after a strike; it
        is passed when the next raise starts from a share with a `reliable` mean.
        """
        has_strike = np.isfinite(self.raised_from) & (self.strikes > 0)
        continues = has_strike | ((after > self.raised_from) & ~reliable)
        new = ~continues & (after > before) & (before > 0)
        return replace(
            self,
            raised_from=np.where(continues, self.raised_from, np.where(new, before, np.nan)),
            raised_speed=np.where(new, speed, self.raised_speed),
            raised_reports=np.where(new, reports, self.raised_reports),
        )

    def judged(self, shares: IntArray, speeds: Speeds, drop: float) -> Ceilings:
        """Learn new bounds and drop outdated ones, given the speeds measured at `shares`."""
        on_trial = shares > self.raised_from
        now_drop = np.log(self.raised_speed / speeds.now)
        mean_drop = np.log(self.raised_speed / speeds.mean)
        noise = SIGMAS * speeds.sd
        strike = now_drop > drop + noise * np.sqrt(1 / self.raised_reports + 1)
        strikes = np.where(on_trial & strike, self.strikes + 1, self.strikes)
        strikes = np.where(on_trial & (now_drop < drop), 0.0, strikes)
        clear = mean_drop > drop + noise * np.sqrt(1 / self.raised_reports + 1 / speeds.reports)
        failed = on_trial & (clear | (strikes >= STRIKES))
        # A smaller share may have a lower speed, due to the fixed cost, but takes no longer.
        min_speed = self.speed * shares / self.share
        margin = np.exp(drop + noise / np.sqrt(speeds.reports))
        changed = (speeds.mean > self.speed * margin) | (speeds.mean * margin < min_speed)
        share = np.where(changed & (shares <= self.share), np.inf, self.share)
        return replace(
            self,
            share=np.where(failed, self.raised_from, share),
            speed=np.where(failed, self.raised_speed, self.speed),
            raised_from=np.where(failed, np.nan, self.raised_from),
            strikes=np.where(failed, 0.0, strikes),
        )

    def apply(self, batch: int, lower: IntArray, upper: IntArray) -> tuple[Ceilings, IntArray]:
        """Upper bounds including the learned ones, which are dropped if the batch does not fit."""
        learned = np.maximum(np.minimum(upper, self.share), lower).astype(np.int64)
        if int(learned.sum()) >= batch:
            return self, learned
        return Ceilings.none(len(lower)), upper
