"""ARIMA(p, 1, q) on the logarithm of speed, with coefficients learned online."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstep.errors import ConfigError
from evenstep.predict.kalman import Block, covariance, dot
from evenstep.predict.log_change import LogChangeForecaster, Prediction
from evenstep.predict.per_worker import Columns
from evenstep.types import FloatArray, WorkerId

PRIOR_VAR = 0.3


@dataclass(frozen=True, kw_only=True, eq=False)
class Arima(LogChangeForecaster):
    """Forecasts from the last `p` changes of speed and the last `q` errors of its own forecasts.

    This is extended least squares: forecast errors stand in for the unobserved noise. Free CPU and
    memory are ignored.
    """

    p: int = 2
    q: int = 1

    def __post_init__(self) -> None:
        if self.p < 0 or self.q < 0 or self.p + self.q == 0:
            raise ConfigError("p", f"p and q must be 0 or more, not both 0: {self.p}, {self.q}")

    def _initial(self, workers: Sequence[WorkerId]) -> Columns:
        size = self.p + self.q
        return super()._initial(workers) | {
            "before": np.zeros((size, len(workers))),
            "weights": np.zeros((size, len(workers))),
            "covariance": covariance(np.full(size, PRIOR_VAR), (len(workers),)),
        }

    def _predict(self, outlook: FloatArray) -> Prediction:
        col = self._columns
        changes, errors = np.split(col["before"], [self.p])
        changes = np.concatenate([col["step"][None], changes])[: self.p]
        errors = np.concatenate([col["surprise"][None], errors])[: self.q]
        now = np.concatenate([changes, errors])
        block = Block(col["weights"], col["covariance"], np.full(len(now), PRIOR_VAR))
        return Prediction(dot(block.weights, now), (block,), (now,), {"before": now})
