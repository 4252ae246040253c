"""Uses a forecaster only for workers where it has beaten the persistence forecast `last`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evenstep.errors import ConfigError
from evenstep.ports import Forecaster
from evenstep.predict.last import Last
from evenstep.predict.per_worker import Columns, PerWorkerForecaster, full
from evenstep.types import FloatArray, WorkerId

MAX_ERROR = np.log(4.0) ** 2  # squared; clipped at a factor of four, so that no spike decides


@dataclass(frozen=True, kw_only=True, eq=False)
class Gated(PerWorkerForecaster):
    """Forecasts with `inner` for workers where it has been more accurate, else with `last`.

    More accurate means a smaller EWMA (gain `alpha`) of the squared error of log speed, after at
    least `min_steps` comparisons.
    """

    inner: Forecaster
    alpha: float = 0.05
    min_steps: int = 10
    _last: Last = field(init=False, repr=False, default_factory=Last)

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ConfigError("alpha", f"must lie in (0, 1], got {self.alpha}")

    def _initial(self, workers: Sequence[WorkerId]) -> Columns:
        return {name: full(0, workers) for name in ("count", "inner_error", "last_error")}

    def set_roster(self, workers: Sequence[WorkerId]) -> None:
        super().set_roster(workers)
        self.inner.set_roster(workers)
        self._last.set_roster(workers)

    def learn(self, speed: FloatArray, outlook: FloatArray) -> None:
        measured, col = self._speed(speed), self._columns
        inner, last = self.inner.forecast(outlook), self._last.forecast(outlook)
        compared = ~np.isnan(measured) & _is_speed(inner) & _is_speed(last)
        gain = np.maximum(self.alpha, 1 / (col["count"] + 1))
        for name, forecast in (("inner_error", inner), ("last_error", last)):
            usable = np.where(compared, forecast, 1)
            error = np.minimum(np.log(usable / np.where(compared, measured, 1)) ** 2, MAX_ERROR)
            col[name] += np.where(compared, gain * (error - col[name]), 0)
        col["count"] += compared
        self.inner.learn(measured, outlook)
        self._last.learn(measured, outlook)

    def forecast(self, outlook: FloatArray) -> FloatArray:
        inner, last = self.inner.forecast(outlook), self._last.forecast(outlook)
        return np.where(self.trusted & _is_speed(inner), inner, last)

    @property
    def trusted(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """For each worker of the roster, whether `inner` is used."""
        col = self._columns
        return (col["count"] >= self.min_steps) & (col["inner_error"] < col["last_error"])

    def state_dict(self) -> dict[str, Any]:
        parts = {"inner": self.inner.state_dict(), "last": self._last.state_dict()}
        return super().state_dict() | parts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])  # first: only this may reject the state
        super().load_state_dict(state)
        self._last.load_state_dict(state["last"])


def _is_speed(forecast: FloatArray) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return (forecast > 0) & (forecast < np.inf)
