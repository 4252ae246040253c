"""Buffers `self.log` calls until the step is committed, then aggregates them over workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torchmetrics import Metric

from evenstep.errors import ConfigError


class Logged:
    """Replaces `log` of a collection of Lightning's results while it is entered."""

    def __init__(self, results: Any, put: Callable[[dict[str, Any]], None]) -> None:
        self._results, self._put = results, put

    def __enter__(self) -> Logged:
        self._results.log = self
        return self

    def __exit__(self, *_: object) -> None:
        del self._results.log

    def __call__(self, fx: str, name: str, value: Any, **options: Any) -> None:
        del options["sync_dist_fn"], options["sync_dist_group"]  # nothing is synced by Lightning
        reduction = options.pop("reduce_fx")
        word = reduction if isinstance(reduction, str) else reduction.__name__
        self._put({**options, "fx": fx, "name": name, "value": value, "reduce_fx": word})


def play(results: Any, call: Mapping[str, Any]) -> None:
    """Log a value, already aggregated if it has to be, to Lightning's results."""
    options = {**call, "sync_dist": False}
    fx, name, value = (options.pop(key) for key in ("fx", "name", "value"))
    type(results).log(results, fx, name, value, **options)


def check_value(call: Mapping[str, Any]) -> None:
    """Refuse an object with a state that is each worker's own."""
    if isinstance(call["value"], Metric):
        raise ConfigError(
            f"self.log({call['name']!r})",
            "the state of a torchmetrics object is each worker's own. Log a value: "
            "self.log(..., metric(predictions, targets), sync_dist=True)",
        )


def of_all_workers(
    add_up: Callable[[torch.Tensor], torch.Tensor], counted: int, calls: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Aggregate calls with `sync_dist=True` over workers, into those that one process would make.

    `counted` is the number of this worker's samples that count.
    """
    synced = [call for call in calls if call["sync_dist"]]
    if not synced:
        return calls
    own = torch.zeros(len(synced), 2, dtype=torch.float64)
    for row, call in zip(own, synced, strict=True):
        if call["reduce_fx"] not in ("mean", "sum"):
            raise ConfigError(
                f"self.log({call['name']!r})",
                f"reduce_fx={call['reduce_fx']!r} with sync_dist=True is not supported in training "
                "steps; use mean or sum, or log it in validation_step",
            )
        if counted:
            size = call["batch_size"] or counted
            weight = size if call["reduce_fx"] == "mean" else 1
            row[0], row[1] = float(call["value"]) * weight, size
    played = []
    for (value, size), call in zip(add_up(own).tolist(), synced, strict=True):
        mean = value / size if call["reduce_fx"] == "mean" and size else value
        kind, device = call["value"].dtype, call["value"].device
        tensor = torch.tensor(mean, dtype=kind, device=device)
        played.append({**call, "value": tensor, "batch_size": int(size)})
    return [call for call in calls if not call["sync_dist"]] + played
