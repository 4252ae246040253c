"""Profile points: for each worker the shares it was seen at and how long they took.

A time that does not fit the ones before it at the same share is a hiccup, and is left out; several
in a row that are off to the same side are a worker that has changed, and all its points with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenstep.decide.curves import FlatLinear
from evenstep.decide.fit import fit
from evenstep.decide.seat import carry, expected_speed
from evenstep.types import Fleet, FloatArray, IntArray

Mask = NDArray[np.bool_]

SLOTS = 8
"""Shares remembered of a worker. A new one takes the place of the nearest when all are taken."""

MOST_TIMES = 20.0
"""Times that count in a point's mean: old ones fade behind as many new ones."""

TRIED = 3.0
"""Times at a share from which on its mean is trusted over the newest time."""

NOISE = 0.03
"""Relative deviation of a time that is expected before any was seen."""

VARIANCE_RATE = 0.1
"""Weight of the newest deviation in the estimate of noise."""

KNEE_SIGMAS = 3.0
"""How clearly points must tell of a knee. A knee that is only noise hides that less is faster."""

PATIENCE = 5
"""Misfits in a row, to the same side, after which it is the worker that has changed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """One row of slots a worker; an empty slot has `times` 0."""

    share: FloatArray
    seconds: FloatArray  # mean
    times: FloatArray  # how many are in the mean
    misfits: FloatArray  # in a row; negative: faster than its points say
    misfit_log: FloatArray  # sum of the logs of their ratios
    variance: FloatArray  # relative, of one time at a share

    @classmethod
    def none(cls, num_workers: int) -> Profile:
        """All slots empty."""
        slots, column = np.zeros((num_workers, SLOTS)), np.zeros(num_workers)
        return cls(
            share=slots,
            seconds=slots,
            times=slots,
            misfits=column,
            misfit_log=column,
            variance=column + NOISE**2,
        )

    @property
    def known(self) -> Mask:
        """Which workers have a point at all."""
        found: Mask = self.times.max(axis=1) > 0
        return found

    def follow(self, rows: IntArray) -> Profile:
        """The same for another fleet; new workers have none."""
        return Profile(
            share=carry(self.share, rows, 0.0),
            seconds=carry(self.seconds, rows, 0.0),
            times=carry(self.times, rows, 0.0),
            misfits=carry(self.misfits, rows, 0.0),
            misfit_log=carry(self.misfit_log, rows, 0.0),
            variance=carry(self.variance, rows, NOISE**2),
        )

    def lent_by_kind(self, fleet: Fleet, lenders: Mask) -> Profile:
        """The same, where a worker without points takes those of a lender of its kind."""
        known = self.known
        lender: dict[str, int] = {}
        for i in np.flatnonzero(lenders & known):
            lender.setdefault(fleet.kinds[i], int(i))
        rows = np.arange(len(fleet))
        for i in np.flatnonzero(~known):
            rows[i] = lender.get(fleet.kinds[i], i)
        times = self.times[rows]
        return replace(
            self,
            share=self.share[rows],
            seconds=self.seconds[rows],
            # What is only lent gives way to the first times of its own.
            times=np.where(known[:, None], times, np.minimum(times, 1.0)),
        )

    def with_step(self, samples: IntArray, seconds: FloatArray, misfit: float) -> Profile:
        """The same and one step's times (NaN: none), off by more than `misfit` or not."""
        rows = np.flatnonzero(np.isfinite(seconds) & (samples > 0))
        b, t = samples[rows].astype(np.float64), seconds[rows]
        share, mean_s, times = self.share.copy(), self.seconds.copy(), self.times.copy()
        misfits, misfit_log = self.misfits.copy(), self.misfit_log.copy()
        variance = self.variance.copy()

        taken = times[rows] > 0
        distance = np.where(taken, np.abs(share[rows] - b[:, None]), np.inf)
        slot = distance.argmin(axis=1)
        same = distance[np.arange(len(rows)), slot] == 0
        slot = np.where(same | taken.all(axis=1), slot, taken.argmin(axis=1))

        before_s, count = mean_s[rows, slot], times[rows, slot]
        off = np.zeros(len(rows))
        np.log(t / np.where(same, before_s, 1.0), where=same, out=off)
        fits = np.abs(off) <= np.log1p(misfit)
        # A hiccup only ever adds time: of two times that disagree, the shorter is the better guess.
        better = ~fits & (count < TRIED) & (off < 0)
        new = ~same | better
        count = np.where(new, 1.0, np.where(fits, np.minimum(count + 1.0, MOST_TIMES), count))
        after_s = np.where(new, t, np.where(fits, before_s + (t - before_s) / count, before_s))

        onward = np.where(misfits[rows] * off > 0, misfits[rows], 0.0)
        streak = np.where(new | fits, 0.0, onward + np.sign(off))
        total = np.where(streak == 0, 0.0, np.where(onward == 0, 0.0, misfit_log[rows]) + off)
        changed = np.abs(streak) >= PATIENCE
        ratio = np.exp(np.where(changed, total / PATIENCE, 0.0))

        share[rows, slot], mean_s[rows, slot], times[rows, slot] = b, after_s, count
        mean_s[rows] *= ratio[:, None]
        times[rows] = np.where(changed[:, None], np.minimum(times[rows], 1.0), times[rows])
        times[rows[changed], slot[changed]] = TRIED
        misfits[rows] = np.where(changed, 0.0, streak)
        misfit_log[rows] = np.where(changed, 0.0, total)
        variance[rows] += np.where(same & fits, VARIANCE_RATE * (off**2 - variance[rows]), 0.0)
        return Profile(
            share=share,
            seconds=mean_s,
            times=times,
            misfits=misfits,
            misfit_log=misfit_log,
            variance=variance,
        )

    def curves(self, fleet: Fleet) -> FlatLinear:
        """Curves through the points; a line by its expected speed for a worker without any."""
        share, seconds, times = self.share, self.seconds, self.times
        blank = ~self.known
        if blank.any():
            row, most = np.arange(len(blank)), times.argmax(axis=1)
            with np.errstate(invalid="ignore"):
                speed = np.where(blank, np.nan, share[row, most] / seconds[row, most])
            share, seconds, times = share.copy(), seconds.copy(), times.copy()
            share[blank, 0], times[blank, 0] = 1.0, 1.0
            seconds[blank, 0] = 1.0 / expected_speed(fleet, speed)[blank]
        # By relative error: a hundredth of a long step is not worth more than one of a short step.
        weight = np.divide(times, seconds**2, out=np.zeros_like(times), where=times > 0)
        return fit(share, seconds, weight, knee_error=KNEE_SIGMAS**2 * self.variance)
