"""Elman's simple recurrent net: the hidden layer sees its own previous output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from evenstep.predict.net import Net


@dataclass(frozen=True, kw_only=True, eq=False)
class Rnn(Net):
    """Forecasts from the last speed, the coming free CPU and memory, and `width` recurrent units.

    As in Elman's paper, the previous hidden output is a plain input: no backpropagation through
    time.
    """

    recurrent: ClassVar[bool] = True

    width: int = 6
