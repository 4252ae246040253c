"""The next step is as fast as the last one was: no memory, no delay, all of the noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstep.predict.rows import Columns, Rows, full
from evenstep.types import FloatArray, WorkerId


@dataclass(frozen=True, kw_only=True, eq=False)
class Last(Rows):
    """Forecasts the speed that was measured last."""

    def _fresh(self, workers: Sequence[WorkerId]) -> Columns:
        return {"last": full(np.nan, workers)}

    def learn(self, speed: FloatArray, outlook: FloatArray) -> None:
        measured = self._speed(speed)
        self._outlook(outlook)
        last = self._columns["last"]
        self._columns["last"] = np.where(np.isnan(measured), last, measured)

    def forecast(self, outlook: FloatArray) -> FloatArray:
        self._outlook(outlook)
        return self._columns["last"].copy()
