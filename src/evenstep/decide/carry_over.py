"""State carried over when the fleet changes, and the expected speed of workers not yet measured."""

from __future__ import annotations

import numpy as np

from evenstep.types import Fleet, FloatArray, IntArray, WorkerId


def previous_rows(before: tuple[WorkerId, ...], after: tuple[WorkerId, ...]) -> IntArray:
    """Each worker's row in the previous fleet, -1 for a new worker."""
    row = {worker: i for i, worker in enumerate(before)}
    return np.array([row.get(worker, -1) for worker in after], dtype=np.int64)


def carry_over(column: FloatArray, rows: IntArray, fill: float = np.nan) -> FloatArray:
    """`column` reordered for the new fleet, `fill` for new workers. Further axes are kept."""
    if len(column) == 0:
        return np.full((len(rows), *column.shape[1:]), fill)
    kept = column[rows]
    kept[rows < 0] = fill
    return kept


def rated_speed(fleet: Fleet) -> FloatArray:
    """Relative speed from the hardware specification: FLOPS if known for all, else cores."""
    return fleet.flops if np.isfinite(fleet.flops).all() else fleet.cores


def fill_by_kind(fleet: Fleet, measured: FloatArray) -> FloatArray:
    """`measured`, its gaps filled with the mean of the worker's kind (NaN if the kind has none)."""
    by_kind: dict[str, list[float]] = {}
    for kind, value in zip(fleet.kinds, measured.tolist(), strict=True):
        if np.isfinite(value):
            by_kind.setdefault(kind, []).append(value)
    mean = {kind: sum(values) / len(values) for kind, values in by_kind.items()}
    kind_mean = np.array([mean.get(kind, np.nan) for kind in fleet.kinds])
    return np.where(np.isfinite(measured), measured, kind_mean)


def expected_speed(fleet: Fleet, measured: FloatArray) -> FloatArray:
    """Samples per second of every worker, from the best source available for each.

    In order: measured in this run, the mean of its kind, its own warm-up, its rated speed scaled to
    the measured workers. If nothing was measured at all, rated speeds alone (relative).
    """
    speed = fill_by_kind(fleet, measured)
    speed = np.where(np.isfinite(speed), speed, fleet.warmup_samples_per_s)
    known = np.isfinite(speed)
    rated = rated_speed(fleet)
    if not known.any():
        return rated
    return np.where(known, speed, rated * float(np.median(speed[known] / rated[known])))
