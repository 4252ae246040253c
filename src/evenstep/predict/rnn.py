"""Elman's simple recurrent net: the hidden layer sees its own previous output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from evenstep.predict.net import Cell, Net, tanh_cell
from evenstep.types import FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Rnn(Net):
    """Forecasts from the last speed, the coming free CPU and memory, and `width` recurrent units.

    As in Elman's paper, the previous hidden output is a plain input: no backpropagation through
    time.
    """

    recurrent: ClassVar[bool] = True

    width: int = 6

    def _cell(self, drive: FloatArray, carry: FloatArray) -> Cell:
        return tanh_cell(drive, carry)
