"""NARX: a nonlinear autoregressive network with exogenous inputs, the forecaster of LB-BSP."""

from __future__ import annotations

from dataclasses import dataclass

from evenstep.errors import ConfigError
from evenstep.predict.net import Net


@dataclass(frozen=True, kw_only=True, eq=False)
class Narx(Net):
    """Forecasts from the last `delays` speeds and outlooks (free CPU and memory) and the next one.

    One hidden layer of `width` tanh units. The paper gives neither value; both are our choice.
    """

    delays: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delays < 1:
            raise ConfigError("delays", f"must be 1 or more, got {self.delays}")

    @property
    def _delays(self) -> int:
        return self.delays
