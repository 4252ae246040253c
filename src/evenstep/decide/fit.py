"""Step-time curves from measured points: flat up to a knee, then a line, all workers at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenstep.decide.curves import FlatLinear
from evenstep.errors import InvalidInputError
from evenstep.types import FloatArray

LEAST_SLOPE = 1e-9
"""Least cost of a sample, of the mean cost of one: no sample is free."""

TIE = 1e-20
"""Squared errors this near each other, of the sum of squares, are one: rounding, not evidence."""


def fit(
    shares: FloatArray,
    seconds: FloatArray,
    weight: FloatArray,
    *,
    fixed_fraction: float = 0.0,
    belief: FloatArray | float = 0.0,
    knee_error: FloatArray | float = 0.0,
) -> FlatLinear:
    """Curves `max(floor, fixed + per_sample * share)` of least weighted squared error.

    One row of points a worker, in any order; weight 0 marks an empty slot, whose other entries do
    not matter. Every place of the knee among a worker's points is tried and the leftmost of the
    best is taken, so a plain line stays one. Points of such a shape without noise give the curve
    exactly, if two distinct shares lie beyond the knee and one before it.

    What the points leave open is filled with caution: where the line rests on one share, or where
    no point lies on it at all, `fixed_fraction` of the time at the largest share is taken to be
    fixed and the rest to grow with the share from there on.

    Noise is kept out of the shape by two columns: `belief` is the weight of `fixed_fraction`
    against that of the points, `knee_error` the squared error that a knee must save to be seen.
    """
    used = weight > 0
    if not used.any(axis=1).all():
        blank = int(used.any(axis=1).argmin())
        raise InvalidInputError(f"points of curve {blank}", "none to fit; lend it those of a peer")
    w, b, t = _in_order_of_share(shares, seconds, weight, used)
    largest = b[-1]

    # Row k of what follows: the knee lies before the k-th point, so k of them are flat.
    flat_w, flat_t = _sums_before(w), _sums_before(w * t)
    line_w, line_t = _sums_from(w), _sums_from(w * t)
    floor = _ratio(flat_t, flat_w)

    # Measured from the largest share, so that near shares do not drown in their own size.
    x = b - largest
    line_x, line_xx, line_xt = _sums_from(w * x), _sums_from(w * x * x), _sums_from(w * x * t)
    mean = np.where(line_w > 0, _ratio(line_t, line_w), floor)
    # A belief is one point more: at share zero, that fraction of the time.
    believed = fixed_fraction * mean
    line_w, line_t = line_w + belief, line_t + belief * believed
    line_x, line_xx = line_x - belief * largest, line_xx + belief * largest**2
    line_xt = line_xt - belief * largest * believed
    slope = _ratio(line_w * line_xt - line_x * line_t, line_w * line_xx - line_x**2)
    fixed = _ratio(line_t, line_w) - slope * (_ratio(line_x, line_w) + largest)
    # A line that would start below zero starts at zero.
    steep = fixed < 0
    slope = np.where(steep, _ratio(_sums_from(w * b * t), _sums_from(w * b * b)), slope)
    fixed = np.where(steep, 0.0, fixed)
    # One share on the line, or none.
    open_ended = np.concatenate([b, b[-1:]]) == largest
    slope = np.where(open_ended, (1.0 - fixed_fraction) * mean / largest, slope)
    fixed = np.where(open_ended, fixed_fraction * mean, fixed)

    # Knee by knee: small arrays stay in the cache, which is faster than all knees at once.
    expected = (np.maximum(f, a + s * b) for f, a, s in zip(floor, fixed, slope, strict=True))
    error = np.array([(w * (e - t) ** 2).sum(axis=0) for e in expected])
    error[1:] += knee_error
    # A line that falls says no more than the flat part alone, which is the last row.
    error = np.where(slope > 0, error, np.inf)
    best = (error <= error.min(axis=0) + TIE * (w * t * t).sum(axis=0)).argmax(axis=0)

    at = best, np.arange(len(best))
    return FlatLinear(
        floor_s=floor[at],
        fixed_s=fixed[at],
        per_sample_s=np.maximum(slope[at], LEAST_SLOPE * mean[at] / largest),
    )


def _in_order_of_share(
    shares: FloatArray, seconds: FloatArray, weight: FloatArray, used: NDArray[np.bool_]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Weights, shares and times with one worker a column, smallest share first.

    An empty slot goes last and repeats the largest share with weight 0.
    """
    largest = np.where(used, shares, -np.inf).max(axis=1, keepdims=True)
    order = np.argsort(np.where(used, shares, np.inf), axis=1, kind="stable")
    w, b, t = (
        np.ascontiguousarray(np.take_along_axis(np.where(used, column, blank), order, axis=1).T)
        for column, blank in ((weight, 0.0), (shares, largest), (seconds, 0.0))
    )
    return w, b, t


def _sums_before(column: FloatArray) -> FloatArray:
    """For each k, the sum over the first k points."""
    sums = np.zeros((len(column) + 1, column.shape[1]))
    np.cumsum(column, axis=0, out=sums[1:])
    return sums


def _sums_from(column: FloatArray) -> FloatArray:
    """For each k, the sum over all points but the first k."""
    return _sums_before(column[::-1])[::-1]


def _ratio(above: FloatArray, below: FloatArray) -> FloatArray:
    """Their quotient, 0 where there is nothing to divide by."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)
