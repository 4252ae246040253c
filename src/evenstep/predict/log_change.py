"""Forecasters of the change in log speed from the last step to the next.

In logarithms, a worker of 3 samples per second and one of 30,000 look the same. An untrained
forecaster predicts no change and so equals `last`; it learns from its error in every measured step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstep.predict.kalman import OUTLIER, Block, correct
from evenstep.predict.per_worker import Columns, PerWorkerForecaster, full
from evenstep.types import FloatArray, WorkerId

INITIAL_NOISE_VAR = 1e-3  # of the forecast error: 3 % standard deviation
MIN_NOISE_VAR = 1e-6  # 0.1 %; below it every error would look significant
NOISE_GAIN = 0.03
MAX_ERROR_RATIO = 25.0  # squared errors are clipped at this many times the noise variance
MAX_EXTRAPOLATION = np.log(2.0)  # forecasts stay within twice the measured range


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted change of a step, and its derivatives by the weights."""

    change: FloatArray  # of log speed
    blocks: tuple[Block, ...]
    slopes: tuple[FloatArray, ...]
    updates: Columns  # columns to store once the step has been measured


@dataclass(frozen=True, kw_only=True, eq=False)
class LogChangeForecaster(PerWorkerForecaster):
    """Learns online how much faster or slower each worker's next step is."""

    @abstractmethod
    def _predict(self, outlook: FloatArray) -> Prediction:
        """Predict the next step, without side effects."""

    def _initial(self, workers: Sequence[WorkerId]) -> Columns:
        unknown = {name: full(np.nan, workers) for name in ("last", "low", "high")}
        return unknown | {
            "count": full(0, workers),  # of steps measured
            "noise": full(INITIAL_NOISE_VAR, workers),
            "step": full(0, workers),  # the last change and the last forecast error,
            "surprise": full(0, workers),  # both clipped to the range of noise
        }

    def learn(self, speed: FloatArray, outlook: FloatArray) -> None:
        measured, rows = self._speed(speed), self._outlook(outlook)
        col = self._columns
        is_measured = ~np.isnan(measured)
        learns = is_measured & (col["count"] > 0)
        prediction = self._cached_prediction(rows)
        step = np.log(measured) - np.log(col["last"])
        error = step - self._clipped(prediction.change)
        correct(prediction.blocks, prediction.slopes, error, col["noise"], learns)

        # A jump is followed, not averaged away: clip it to the range of noise before smoothing.
        bound = OUTLIER * np.sqrt(col["noise"])
        updated = {"step": np.clip(step, -bound, bound), "surprise": np.clip(error, -bound, bound)}
        gain = np.maximum(NOISE_GAIN, 1 / (col["count"] + 2))
        noise = col["noise"] + gain * (
            np.minimum(error**2, MAX_ERROR_RATIO * col["noise"]) - col["noise"]
        )
        updated["noise"] = np.maximum(noise, MIN_NOISE_VAR)
        updated = {name: np.where(learns, new, col[name]) for name, new in updated.items()}
        updates = {
            "last": measured,
            "low": np.fmin(col["low"], measured),
            "high": np.fmax(col["high"], measured),
            "count": col["count"] + 1,
        }
        for name, new in (updates | prediction.updates).items():
            updated[name] = np.where(is_measured, new, col[name])
        col.update(updated)
        self._table.cached = None

    def forecast(self, outlook: FloatArray) -> FloatArray:
        change = self._cached_prediction(self._outlook(outlook)).change
        forecast: FloatArray = self._columns["last"] * np.exp(self._clipped(change))
        return forecast

    def _cached_prediction(self, outlook: FloatArray) -> Prediction:
        """The prediction for an outlook, computed once for `forecast`, the gate and `learn`."""
        table, key = self._table, outlook.tobytes()
        if table.cached is None or table.cached[0] != key:
            table.cached = key, self._predict(outlook)
        prediction: Prediction = table.cached[1]
        return prediction

    def _clipped(self, change: FloatArray) -> FloatArray:
        low, high, last = (np.log(self._columns[name]) for name in ("low", "high", "last"))
        return np.clip(change, low - last - MAX_EXTRAPOLATION, high - last + MAX_EXTRAPOLATION)
