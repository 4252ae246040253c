"""Persistence forecast: the next step is as fast as the last one; no lag, no smoothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstep.predict.per_worker import Columns, PerWorkerForecaster, full
from evenstep.types import FloatArray, WorkerId


@dataclass(frozen=True, kw_only=True, eq=False)
class Last(PerWorkerForecaster):
    """Forecasts the last measured speed."""

    def _initial(self, workers: Sequence[WorkerId]) -> Columns:
        return {"last": full(np.nan, workers)}

    def learn(self, speed: FloatArray, outlook: FloatArray) -> None:
        measured = self._speed(speed)
        self._outlook(outlook)
        last = self._columns["last"]
        self._columns["last"] = np.where(np.isnan(measured), last, measured)

    def forecast(self, outlook: FloatArray) -> FloatArray:
        self._outlook(outlook)
        return self._columns["last"].copy()
