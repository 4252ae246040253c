"""Where a run's figures go for other tools, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from evenstep.errors import ConfigError
from evenstep.observe.sinks.json_lines import JsonLines
from evenstep.observe.sinks.prometheus import PrometheusFile
from evenstep.observe.sinks.tensorboard import TensorBoard
from evenstep.ports import Sink, look_up
from evenstep.strict import within

SINKS: dict[str, type[Any]] = {
    "jsonlines": JsonLines,
    "tensorboard": TensorBoard,
    "prometheus": PrometheusFile,
}

__all__ = ["SINKS", "JsonLines", "PrometheusFile", "SinkChoice", "TensorBoard", "open_sinks"]


SinkChoice = str | Callable[[], Sink]
"""`NAME:TARGET`, or a function that makes a sink."""


def open_sinks(chosen: str | Sequence[SinkChoice], field: str) -> dict[str, Sink]:
    """The sinks by what people call them. `field` is the option or argument that errors name."""
    opened: dict[str, Sink] = {}
    try:
        with within(field):
            for choice in [chosen] if isinstance(chosen, str) else chosen:
                if choice in opened:
                    raise ConfigError("", f"{choice} is given twice")
                name, sink = _open(choice)
                opened[name if name not in opened else f"{name} {len(opened)}"] = sink
    except BaseException:
        for sink in opened.values():
            with suppress(Exception):
                sink.close()
        raise
    return opened


def _open(choice: SinkChoice) -> tuple[str, Sink]:
    if not isinstance(choice, str) and not callable(choice):
        raise ConfigError(
            "", f"expected NAME:TARGET or a function that makes a sink, got {choice!r}"
        )
    try:
        if not isinstance(choice, str):
            sink = choice()
            return type(sink).__name__, sink
        name, _, target = choice.partition(":")
        return choice, look_up("sinks", name, SINKS)(target)
    except ConfigError:
        raise
    except Exception as e:
        raise ConfigError("", f"{choice} cannot be opened: {e}") from e
