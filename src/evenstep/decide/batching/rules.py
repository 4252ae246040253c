"""What the policies of the papers share: bounds, measurements, and how a change is told."""

from __future__ import annotations

import numpy as np

from evenstep.errors import ConfigError
from evenstep.types import LONGEST_S, SHORTEST_S, Fleet, FloatArray, IntArray, Outcome


def working_bounds(fleet: Fleet, batch: int) -> tuple[IntArray, IntArray]:
    """The fleet's bounds, raised so that everyone has a sample, where the batch allows it.

    A worker without a share is never measured again, and so would never get one back.
    """
    lower = np.maximum(fleet.lower, np.minimum(fleet.upper, 1))
    return (lower if int(lower.sum()) <= batch else fleet.lower), fleet.upper


def hold(shares: IntArray, batch: int, lower: IntArray, upper: IntArray) -> bool:
    """Whether these shares keep the sum and the bounds."""
    return int(shares.sum()) == batch and bool(((lower <= shares) & (shares <= upper)).all())


def measured_s(outcome: Outcome) -> FloatArray:
    """The step's compute times, NaN where a worker measured none."""
    return np.clip(outcome.compute_s, SHORTEST_S, LONGEST_S)


def measured_speed(outcome: Outcome) -> FloatArray:
    """Samples per second in this step, NaN where a worker measured none."""
    return np.where(outcome.samples > 0, outcome.samples, np.nan) / measured_s(outcome)


def seconds_at(shares: IntArray, outcome: Outcome) -> FloatArray:
    """What each worker's share takes at the speed it showed, NaN where it showed none.

    That is the time it measured, except where it computed another number of samples: the step was
    planned before the last change, or the epoch's last batch was short.
    """
    with np.errstate(divide="ignore"):
        scale = np.where(shares > 0, shares, np.nan) / outcome.samples
    return np.where(np.isfinite(scale), measured_s(outcome) * scale, np.nan)


def relative_change(before: IntArray, after: IntArray | FloatArray) -> FloatArray:
    """How much each share grows or shrinks, of what it was."""
    change: FloatArray = np.abs(after - before) / np.maximum(before, 1)
    return change


def require(met: bool, field: str, problem: str) -> None:
    """Refuse a setting unless its condition is met."""
    if not met:
        raise ConfigError(field, problem)
