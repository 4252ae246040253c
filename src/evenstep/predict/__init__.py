"""Forecasters of each worker's speed, by name."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

from evenstep.errors import ConfigError, UnknownSettingError, nearest
from evenstep.ports import Forecaster, look_up
from evenstep.predict.arima import Arima
from evenstep.predict.ema import Ema
from evenstep.predict.gate import Gated
from evenstep.predict.last import Last
from evenstep.predict.lstm import Lstm
from evenstep.predict.narx import Narx
from evenstep.predict.rnn import Rnn
from evenstep.strict import build, within

FORECASTERS: dict[str, type[Any]] = {
    "last": Last,
    "ema": Ema,
    "arima": Arima,
    "rnn": Rnn,
    "lstm": Lstm,
    "narx": Narx,
}

__all__ = ["FORECASTERS", "Arima", "Ema", "Gated", "Last", "Lstm", "Narx", "Rnn", "make_forecaster"]


def make_forecaster(name: str, options: Mapping[str, Any] | None = None) -> Forecaster:
    """The forecaster named `name`, gated: it falls back to `last` where `last` does better."""
    with within("forecaster"):
        kind = look_up("forecasters", name, FORECASTERS)
        forecaster: Forecaster = kind(**_settings(kind, options or {}))
    return forecaster if isinstance(forecaster, Last) else Gated(inner=forecaster)


def _settings(kind: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """`options`, each validated against the constructor parameter of that name."""
    known = signature(kind, eval_str=True).parameters
    settings = {}
    for key, value in options.items():
        if key not in known:
            if not known:
                raise ConfigError(key, f"{kind.__name__.lower()} has no settings; remove it")
            near = nearest(key, known)
            raise UnknownSettingError(key, near or f"one of {', '.join(known)}")
        expected = known[key].annotation
        with within(key):
            settings[key] = value if expected is Parameter.empty else build(expected, value)
    return settings
