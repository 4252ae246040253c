"""Forecasters that say by which factor the next step differs from the last.

Everything happens in logarithms, where a worker of 3 samples per second and one of 30,000 look the
same. A forecaster that has learned nothing says "no change" and so equals `last`; every step
measured teaches it by how far it was wrong.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstep.predict.kalman import OUTLIER, Block, correct
from evenstep.predict.rows import Columns, Rows, full
from evenstep.types import FloatArray, WorkerId

FIRST_NOISE = 1e-3  # variance of the error: 3 %, until measured
LEAST_NOISE = 1e-6  # 0.1 %; below, everything would look like news
NOISE_GAIN = 0.03
MOST_NEWS = 25.0  # times the noise: so much of one error goes into its estimate
BEYOND_SEEN = np.log(2.0)  # a forecast stays within twice the range of what was measured


@dataclass(frozen=True, slots=True)
class Look:
    """A first look at a step: the change it should bring, and how that depends on the weights."""

    change: FloatArray  # of the logarithm of speed
    blocks: tuple[Block, ...]
    slopes: tuple[FloatArray, ...]
    after: Columns  # to be remembered once the step has been measured


@dataclass(frozen=True, kw_only=True, eq=False)
class Change(Rows):
    """Learns online how much faster or slower each worker's next step is."""

    @abstractmethod
    def _look(self, outlook: FloatArray) -> Look:
        """What the coming step should bring. Changes nothing."""

    def _fresh(self, workers: Sequence[WorkerId]) -> Columns:
        unknown = {name: full(np.nan, workers) for name in ("last", "low", "high")}
        return unknown | {
            "count": full(0, workers),  # of steps measured
            "noise": full(FIRST_NOISE, workers),
            "step": full(0, workers),  # the last change, and the last error of a forecast,
            "surprise": full(0, workers),  # both cut off where they are no longer noise
        }

    def learn(self, speed: FloatArray, outlook: FloatArray) -> None:
        measured, lines = self._speed(speed), self._outlook(outlook)
        col = self._columns
        seen = ~np.isnan(measured)
        learns = seen & (col["count"] > 0)
        look = self._looked(lines)
        step = np.log(measured) - np.log(col["last"])
        error = step - self._within_reason(look.change)
        correct(look.blocks, look.slopes, error, col["noise"], learns)

        # A jump is followed, not averaged away: only so much of it counts as noise to smooth.
        bound = OUTLIER * np.sqrt(col["noise"])
        kept = {"step": np.clip(step, -bound, bound), "surprise": np.clip(error, -bound, bound)}
        gain = np.maximum(NOISE_GAIN, 1 / (col["count"] + 2))
        noise = col["noise"] + gain * (
            np.minimum(error**2, MOST_NEWS * col["noise"]) - col["noise"]
        )
        kept["noise"] = np.maximum(noise, LEAST_NOISE)
        kept = {name: np.where(learns, new, col[name]) for name, new in kept.items()}
        told = {
            "last": measured,
            "low": np.fmin(col["low"], measured),
            "high": np.fmax(col["high"], measured),
            "count": col["count"] + 1,
        }
        for name, new in (told | look.after).items():
            kept[name] = np.where(seen, new, col[name])
        col.update(kept)
        self._table.looked = None

    def forecast(self, outlook: FloatArray) -> FloatArray:
        change = self._looked(self._outlook(outlook)).change
        forecast: FloatArray = self._columns["last"] * np.exp(self._within_reason(change))
        return forecast

    def _looked(self, outlook: FloatArray) -> Look:
        """What the coming step should bring, worked out once: to forecast, to compare, to learn."""
        table, key = self._table, outlook.tobytes()
        if table.looked is None or table.looked[0] != key:
            table.looked = key, self._look(outlook)
        look: Look = table.looked[1]
        return look

    def _within_reason(self, change: FloatArray) -> FloatArray:
        low, high, last = (np.log(self._columns[name]) for name in ("low", "high", "last"))
        return np.clip(change, low - last - BEYOND_SEEN, high - last + BEYOND_SEEN)
