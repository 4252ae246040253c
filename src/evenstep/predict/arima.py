"""ARIMA(p, 1, q) on the logarithm of speed, its coefficients learned online."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstep.errors import ConfigError
from evenstep.predict.change import Change, Look
from evenstep.predict.kalman import Block, covariance, dot
from evenstep.predict.rows import Columns
from evenstep.types import FloatArray, WorkerId

PRIOR = 0.3


@dataclass(frozen=True, kw_only=True, eq=False)
class Arima(Change):
    """Forecasts from the last `p` changes of speed and the last `q` errors of its own forecasts.

    This is extended least squares: the errors stand in for the noise that cannot be seen. It knows
    nothing of free CPU and memory.
    """

    p: int = 2
    q: int = 1

    def __post_init__(self) -> None:
        if self.p < 0 or self.q < 0 or self.p + self.q == 0:
            raise ConfigError("p", f"p and q must be 0 or more, not both 0: {self.p}, {self.q}")

    def _fresh(self, workers: Sequence[WorkerId]) -> Columns:
        size = self.p + self.q
        return super()._fresh(workers) | {
            "before": np.zeros((size, len(workers))),
            "weights": np.zeros((size, len(workers))),
            "covariance": covariance(np.full(size, PRIOR), (len(workers),)),
        }

    def _look(self, outlook: FloatArray) -> Look:
        col = self._columns
        steps, surprises = np.split(col["before"], [self.p])
        steps = np.concatenate([col["step"][None], steps])[: self.p]
        surprises = np.concatenate([col["surprise"][None], surprises])[: self.q]
        now = np.concatenate([steps, surprises])
        block = Block(col["weights"], col["covariance"], np.full(len(now), PRIOR))
        return Look(dot(block.weights, now), (block,), (now,), {"before": now})
