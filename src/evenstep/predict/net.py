"""A small net per worker that learns, from the first step on, how free CPU and memory make speed.

The net describes the logarithm of speed as a function G of what is known before a step, and the
forecast is the last speed times exp(G(now) - G(before)): where the outlook stays, so does the
speed, and an untrained net equals `last`. G has a hidden layer and direct links past it. What the
inputs do not explain is smoothed through the surprises, the errors of the forecasts before.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar
from zlib import crc32

import numpy as np
from numpy.random import Generator, default_rng

from evenstep.errors import ConfigError
from evenstep.predict.change import Change, Look
from evenstep.predict.kalman import Block, covariance, dot
from evenstep.predict.rows import Columns
from evenstep.types import FloatArray, WorkerId

# Variances of the weights before anything is learned. Halving the free CPU about halves the speed,
# so a direct link is of order one; an older outlook matters less, by LAG for each step back.
SURPRISE, DIRECT, LAG, INNER = 0.3, 0.3, 0.25, 0.03
SPREAD, ECHO = 1.5, 0.5  # of the first weights from the outlook, and from the hidden layer's past

Cell = tuple[FloatArray, FloatArray, FloatArray]
"""What a hidden layer gives [unit, worker], what it carries on, its slopes [gate, unit, worker]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Net(Change):
    """Inputs, links and learning that all nets share; a net is its hidden layer."""

    gates: ClassVar[int] = 1  # weights a hidden unit has for each input
    recurrent: ClassVar[bool] = False  # whether the hidden layer sees what it gave a step ago
    strength: ClassVar[float] = 0.03  # variance of the weights from hidden units, to begin with

    width: int = 8
    seed: int = 0

    @abstractmethod
    def _cell(self, drive: FloatArray, carry: FloatArray) -> Cell:
        """The hidden layer: `drive` is what reaches each gate, `carry` what it kept."""

    @property
    def _delays(self) -> int:
        return 1

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError("width", f"must be 1 or more, got {self.width}")
        if self.seed < 0:
            raise ConfigError("seed", f"must not be negative, got {self.seed}")

    def _fresh(self, workers: Sequence[WorkerId]) -> Columns:
        inputs, size = self._num_inputs, len(workers)
        inner = np.empty((inputs, self.gates, self.width, size))
        for i, worker in enumerate(workers):
            # By name, not by place: a worker's net is the same in every roster.
            rng = default_rng([self.seed, crc32(worker.encode())])
            inner[..., i] = self._first_weights(rng)
        return super()._fresh(workers) | {
            "before": np.concatenate([np.zeros((inputs - 1, size)), np.ones((1, size))]),
            "told": np.zeros((2, size)),  # 1: free CPU, free memory are known since some step
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
            [np.full(self._delays, SURPRISE), DIRECT * lags, np.full(self.width, self.strength)]
        )

    def _first_weights(self, rng: Generator) -> FloatArray:
        first = rng.normal(scale=SPREAD, size=(self._num_inputs, self.gates, self.width))
        first[: self._delays] = 0  # noise must not shake the layer before it is known to matter
        first[3 * self._delays : -1] *= ECHO / SPREAD / np.sqrt(self.width)
        return first

    def _look(self, outlook: FloatArray) -> Look:
        col, d, inner = self._columns, self._delays, self._columns["inner"]
        before = self._before(outlook)
        given, carry, slope_before = self._cell(dot(inner, _wide(before)), col["carry"])

        # Newest first: surprises, then (CPU, memory) of each step; an echo if recurrent; a one.
        now = np.concatenate(
            [
                col["surprise"][None],
                before[: d - 1],
                _centred(outlook, before[d : d + 2]),
                before[d : 3 * d - 2],
                given[: self.width * self.recurrent],
                before[-1:],
            ]
        )
        gives, _, slope = self._cell(dot(inner, _wide(now)), carry)

        direct = np.concatenate([now[:d], now[d : 3 * d] - before[d : 3 * d], gives - given])
        told = np.where(np.isnan(outlook), col["told"], 1.0)
        outer = Block(col["outer"], col["outer_covariance"], self._outer_prior)
        nodes = Block(inner, col["inner_covariance"], np.full(len(now), INNER))
        hidden = outer.weights[-self.width :] * (_wide(now) * slope - _wide(before) * slope_before)
        return Look(
            dot(outer.weights, direct),
            (outer, nodes),
            (direct, hidden),
            {"before": now, "carry": carry, "told": told},
        )

    def _before(self, outlook: FloatArray) -> FloatArray:
        """The inputs of the last step; an outlook that was never told is taken to be as it is now.

        Else the first one told would look like a change that did nothing, and teach just that.
        """
        col, d = self._columns, self._delays
        before = col["before"].copy()
        told, now = (np.tile(x, (d, 1)) for x in (col["told"], _centred(outlook, 0)))
        before[d : 3 * d] = np.where(told > 0, before[d : 3 * d], now)
        return before


def tanh_cell(drive: FloatArray, carry: FloatArray) -> Cell:
    """A layer of tanh units that keeps nothing by itself."""
    given = np.tanh(drive[0])
    return given, carry, (1 - given**2)[None]


def _centred(outlook: FloatArray, otherwise: FloatArray | float) -> FloatArray:
    return np.where(np.isnan(outlook), otherwise, np.clip(outlook, 0, 1) - 0.5)


def _wide(inputs: FloatArray) -> FloatArray:
    """`[input, worker]` ready to meet `[input, gate, unit, worker]`."""
    return inputs[:, None, None]
