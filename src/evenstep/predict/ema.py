"""An exponential moving average (EWMA): smooths noise, lags behind changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstep.errors import ConfigError
from evenstep.predict.per_worker import Columns, PerWorkerForecaster, full
from evenstep.types import FloatArray, WorkerId


@dataclass(frozen=True, kw_only=True, eq=False)
class Ema(PerWorkerForecaster):
    """Forecasts the EWMA of measured speeds with gain `alpha`."""

    alpha: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ConfigError("alpha", f"must lie in (0, 1], got {self.alpha}")

    def _initial(self, workers: Sequence[WorkerId]) -> Columns:
        return {"mean": full(np.nan, workers)}

    def learn(self, speed: FloatArray, outlook: FloatArray) -> None:
        measured = self._speed(speed)
        self._outlook(outlook)
        mean = self._columns["mean"]
        mean = np.where(np.isnan(mean), measured, mean)
        updated = mean + self.alpha * (measured - mean)
        self._columns["mean"] = np.where(np.isnan(measured), mean, updated)

    def forecast(self, outlook: FloatArray) -> FloatArray:
        self._outlook(outlook)
        return self._columns["mean"].copy()
