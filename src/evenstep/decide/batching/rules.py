"""Bounds, measurements and checks of settings that the published policies share."""

from __future__ import annotations

import numpy as np

from evenstep.errors import ConfigError
from evenstep.types import Fleet, FloatArray, IntArray, Outcome


def working_bounds(fleet: Fleet, batch: int) -> tuple[IntArray, IntArray]:
    """The fleet's bounds, with at least one sample per worker if the batch is large enough.

    A worker without a share is never measured again, so it would never get one back.
    """
    lower = np.maximum(fleet.lower, np.minimum(fleet.upper, 1))
    return (lower if int(lower.sum()) <= batch else fleet.lower), fleet.upper


def is_valid(shares: IntArray, batch: int, lower: IntArray, upper: IntArray) -> bool:
    """Whether shares add up to the batch and lie within the bounds."""
    return int(shares.sum()) == batch and bool(((lower <= shares) & (shares <= upper)).all())


def measured_speed(outcome: Outcome) -> FloatArray:
    """Samples per second in this step, NaN for workers without a measurement."""
    return outcome.samples / outcome.compute_s


def seconds_at(shares: IntArray, outcome: Outcome) -> FloatArray:
    """The time of each worker's share at its measured speed, NaN without a measurement.

    It differs from the measured time if the worker computed another number of samples: the step was
    planned before the last change, or it was the epoch's short last batch.
    """
    with np.errstate(divide="ignore"):
        scale = np.where(shares > 0, shares, np.nan) / outcome.samples
    return np.where(np.isfinite(scale), outcome.compute_s * scale, np.nan)


def relative_change(before: IntArray, after: IntArray | FloatArray) -> FloatArray:
    """Absolute change of each share, relative to what it was."""
    change: FloatArray = np.abs(after - before) / np.maximum(before, 1)
    return change


def check_start(start: str) -> None:
    """Raise a ConfigError unless a policy knows this way to start."""
    require(start in ("static", "uniform"), "start", f"must be static or uniform, got {start!r}")


def require(condition: bool, field: str, problem: str) -> None:
    """Raise a ConfigError unless the condition on a setting holds."""
    if not condition:
        raise ConfigError(field, problem)
