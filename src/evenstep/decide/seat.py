"""What carries over when the fleet changes, and what is expected of a worker not seen yet."""

from __future__ import annotations

import numpy as np

from evenstep.types import Fleet, FloatArray, IntArray, WorkerId


def follow(before: tuple[WorkerId, ...], after: tuple[WorkerId, ...]) -> IntArray:
    """For each worker of `after` its row in `before`, or -1 for a new one."""
    row = {worker: i for i, worker in enumerate(before)}
    return np.array([row.get(worker, -1) for worker in after], dtype=np.int64)


def carry(column: FloatArray, rows: IntArray, blank: float = np.nan) -> FloatArray:
    """`column` for the new fleet, `blank` for new workers. Further axes are kept."""
    if len(column) == 0:
        return np.full((len(rows), *column.shape[1:]), blank)
    kept = column[rows]
    kept[rows < 0] = blank
    return kept


def rated_speed(fleet: Fleet) -> FloatArray:
    """Relative speed by the label on the machine: FLOPS where all are known, else cores."""
    return fleet.flops if np.isfinite(fleet.flops).all() else fleet.cores


def fill_by_kind(fleet: Fleet, measured: FloatArray) -> FloatArray:
    """`measured`, with the mean of its kind where a worker has none (NaN if its kind has none)."""
    alike: dict[str, list[float]] = {}
    for kind, value in zip(fleet.kinds, measured.tolist(), strict=True):
        if np.isfinite(value):
            alike.setdefault(kind, []).append(value)
    mean = {kind: sum(known) / len(known) for kind, known in alike.items()}
    usual = np.array([mean.get(kind, np.nan) for kind in fleet.kinds])
    return np.where(np.isfinite(measured), measured, usual)


def expected_speed(fleet: Fleet, measured: FloatArray) -> FloatArray:
    """Samples per second of every worker, from the best that is known of each.

    Measured in this run; else the mean of its kind; else its own warm-up; else by its label, in
    proportion to those that were measured. With nothing measured at all, labels alone (relative).
    """
    speed = fill_by_kind(fleet, measured)
    speed = np.where(np.isfinite(speed), speed, fleet.warmup_samples_per_s)
    known = np.isfinite(speed)
    rated = rated_speed(fleet)
    if not known.any():
        return rated
    return np.where(known, speed, rated * float(np.median(speed[known] / rated[known])))
