"""A small LSTM: recurrent units that decide by gates what they take in, keep and give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from evenstep.predict.net import Cell, Net
from evenstep.types import FloatArray

# The gates start nearly open and nearly blind, the units with memories from short to long.
OPEN, BLIND, SHORT, LONG = 1.0, 0.3, -2.0, 2.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Lstm(Net):
    """Forecasts from the last speed, the coming free CPU and memory, and `width` LSTM units.

    The gradient goes through one step; what the cells carry is taken as given.
    """

    gates: ClassVar[int] = 4
    recurrent: ClassVar[bool] = True

    strength: ClassVar[float] = 0.3  # what gates let through is small

    width: int = 3

    def _first_weights(self, rng: np.random.Generator) -> FloatArray:
        first = super()._first_weights(rng)
        first[:-1, :3] *= BLIND
        first[-1] *= BLIND
        first[-1, :3] = OPEN
        first[-1, 1] = np.linspace(SHORT, LONG, self.width)
        return first

    def _cell(self, drive: FloatArray, carry: FloatArray) -> Cell:
        # The logistic function by tanh: it cannot overflow.
        take, keep, give = (1 + np.tanh(drive[:3] / 2)) / 2
        new = np.tanh(drive[3])
        cell = keep * carry + take * new
        shown = np.tanh(cell)
        through = give * (1 - shown**2)
        slopes = np.stack(
            [
                through * new * take * (1 - take),
                through * carry * keep * (1 - keep),
                shown * give * (1 - give),
                through * take * (1 - new**2),
            ]
        )
        return give * shown, cell, slopes
