"""A small net per worker that learns online how speed depends on free CPU and memory.

The net models log speed as a function G of what is known before a step; the forecast is the last
speed times exp(G(now) - G(before)). While the outlook is unchanged, so is the speed, and an
untrained net equals `last`. G has a hidden layer and skip connections. Recent forecast errors
(surprises) are inputs too: they smooth what the outlook does not explain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar
from zlib import crc32

import numpy as np
from numpy.random import Generator, default_rng

from evenstep.errors import ConfigError
from evenstep.predict.kalman import Block, covariance, dot
from evenstep.predict.log_change import LogChangeForecaster, Prediction
from evenstep.predict.per_worker import Columns
from evenstep.types import FloatArray, WorkerId

# Prior variances of the weights. Halving the free CPU about halves the speed, so the weight of a
# skip connection is of order one; each step of lag scales it by LAG.
SURPRISE, DIRECT, LAG, INNER = 0.3, 0.3, 0.25, 0.03
INPUT_SD, RECURRENT_SD = 1.5, 0.5  # of the initial hidden weights

Cell = tuple[FloatArray, FloatArray, FloatArray]
"""A hidden layer's output `[unit, worker]`, next state, and slopes `[gate, unit, worker]`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Net(LogChangeForecaster):
    """Inputs, skip connections and learning shared by all nets."""

    gates: ClassVar[int] = 1  # weights per hidden unit and input
    recurrent: ClassVar[bool] = False  # whether the hidden layer sees its previous output
    output_prior: ClassVar[float] = 0.03  # prior variance of the weights from hidden units

    width: int = 8
    seed: int = 0

    def _cell(self, drive: FloatArray, carry: FloatArray) -> Cell:
        """The hidden layer: `drive` is the pre-activation of each gate, `carry` the cell state.

        By default, tanh units without a state of their own.
        """
        out = np.tanh(drive[0])
        return out, carry, (1 - out**2)[None]

    @property
    def _delays(self) -> int:
        return 1

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError("width", f"must be 1 or more, got {self.width}")
        if self.seed < 0:
            raise ConfigError("seed", f"must not be negative, got {self.seed}")

    def _initial(self, workers: Sequence[WorkerId]) -> Columns:
        inputs, size = self._num_inputs, len(workers)
        inner = np.empty((inputs, self.gates, self.width, size))
        for i, worker in enumerate(workers):
            # Seeded by worker id: a worker's net is the same in every roster.
            rng = default_rng([self.seed, crc32(worker.encode())])
            inner[..., i] = self._first_weights(rng)
        return super()._initial(workers) | {
            "before": np.concatenate([np.zeros((inputs - 1, size)), np.ones((1, size))]),
            "told": np.zeros((2, size)),  # 1: free CPU, free memory have been reported
            "carry": np.zeros((self.width, size)),
            "outer": np.zeros((len(self._outer_prior), size)),
            "outer_covariance": covariance(self._outer_prior, (size,)),
            "inner": inner,
            "inner_covariance": covariance(np.full(inputs, INNER), (self.gates, self.width, size)),
        }

    @property
    def _num_inputs(self) -> int:
        return 3 * self._delays + self.width * self.recurrent + 1

    @cached_property
    def _outer_prior(self) -> FloatArray:
        lags = np.repeat(LAG ** np.arange(self._delays), 2)
        return np.concatenate(
            [np.full(self._delays, SURPRISE), DIRECT * lags, np.full(self.width, self.output_prior)]
        )

    def _first_weights(self, rng: Generator) -> FloatArray:
        first = rng.normal(scale=INPUT_SD, size=(self._num_inputs, self.gates, self.width))
        first[: self._delays] = 0  # surprises are noise until learned otherwise
        first[3 * self._delays : -1] *= RECURRENT_SD / INPUT_SD / np.sqrt(self.width)
        return first

    def _predict(self, outlook: FloatArray) -> Prediction:
        col, d, inner = self._columns, self._delays, self._columns["inner"]
        before = self._before(outlook)
        out_before, carry, slope_before = self._cell(dot(inner, _wide(before)), col["carry"])

        # Newest first: surprises, then (CPU, memory) per step, previous output if recurrent, bias.
        now = np.concatenate(
            [
                col["surprise"][None],
                before[: d - 1],
                _centred(outlook, before[d : d + 2]),
                before[d : 3 * d - 2],
                out_before[: self.width * self.recurrent],
                before[-1:],
            ]
        )
        out, _, slope = self._cell(dot(inner, _wide(now)), carry)

        direct = np.concatenate([now[:d], now[d : 3 * d] - before[d : 3 * d], out - out_before])
        reported = np.where(np.isnan(outlook), col["told"], 1.0)
        outer = Block(col["outer"], col["outer_covariance"], self._outer_prior)
        nodes = Block(inner, col["inner_covariance"], np.full(len(now), INNER))
        hidden = outer.weights[-self.width :] * (_wide(now) * slope - _wide(before) * slope_before)
        return Prediction(
            dot(outer.weights, direct),
            (outer, nodes),
            (direct, hidden),
            {"before": now, "carry": carry, "told": reported},
        )

    def _before(self, outlook: FloatArray) -> FloatArray:
        """The inputs of the last step; before the first reported outlook, the current one is used.

        Otherwise that first report would look like a change without an effect.
        """
        col, d = self._columns, self._delays
        before = col["before"].copy()
        reported, now = (np.tile(x, (d, 1)) for x in (col["told"], _centred(outlook, 0)))
        before[d : 3 * d] = np.where(reported > 0, before[d : 3 * d], now)
        return before


def _centred(outlook: FloatArray, default: FloatArray | float) -> FloatArray:
    return np.where(np.isnan(outlook), default, np.clip(outlook, 0, 1) - 0.5)


def _wide(inputs: FloatArray) -> FloatArray:
    """`[input, worker]` broadcastable against `[input, gate, unit, worker]`."""
    return inputs[:, None, None]
