"""A small LSTM: recurrent units with input, forget and output gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from evenstep.predict.net import Cell, Net
from evenstep.types import FloatArray

# Gates start open and depend weakly on inputs; forget biases range from short to long memory.
OPEN_BIAS, GATE_SCALE, SHORT_BIAS, LONG_BIAS = 1.0, 0.3, -2.0, 2.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Lstm(Net):
    """Forecasts from the last speed, the coming free CPU and memory, and `width` LSTM units.

    Backpropagation is truncated to one step: the cell state is treated as a constant.
    """

    gates: ClassVar[int] = 4
    recurrent: ClassVar[bool] = True

    output_prior: ClassVar[float] = 0.3  # larger, since gated outputs are small

    width: int = 3

    def _first_weights(self, rng: np.random.Generator) -> FloatArray:
        first = super()._first_weights(rng)
        first[:-1, :3] *= GATE_SCALE
        first[-1] *= GATE_SCALE
        first[-1, :3] = OPEN_BIAS
        first[-1, 1] = np.linspace(SHORT_BIAS, LONG_BIAS, self.width)
        return first

    def _cell(self, drive: FloatArray, carry: FloatArray) -> Cell:
        # The logistic function via tanh cannot overflow.
        input_gate, forget_gate, output_gate = (1 + np.tanh(drive[:3] / 2)) / 2
        new = np.tanh(drive[3])
        cell = forget_gate * carry + input_gate * new
        squashed = np.tanh(cell)
        cell_slope = output_gate * (1 - squashed**2)
        slopes = np.stack(
            [
                cell_slope * new * input_gate * (1 - input_gate),
                cell_slope * carry * forget_gate * (1 - forget_gate),
                squashed * output_gate * (1 - output_gate),
                cell_slope * input_gate * (1 - new**2),
            ]
        )
        return output_gate * squashed, cell, slopes
