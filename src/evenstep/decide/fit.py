"""Fits flat-then-linear step-time curves to measured points, all workers at once."""

from __future__ import annotations

import numpy as np

from evenstep.decide.curves import FlatLinear, Mask
from evenstep.errors import InvalidInputError
from evenstep.types import FloatArray

MIN_SLOPE = 1e-9
"""Smallest marginal cost of a sample, relative to its mean cost: no sample is free."""

TIE = 1e-20
"""Squared errors closer than this, relative to the sum of squares, differ by rounding only."""


def fit(
    shares: FloatArray,
    seconds: FloatArray,
    weight: FloatArray,
    *,
    fixed_fraction: float = 0.0,
    prior_weight: FloatArray | float = 0.0,
    knee_penalty: FloatArray | float = 0.0,
) -> FlatLinear:
    """Weighted least-squares curves `max(floor, fixed + per_sample * share)`.

    One row of points per worker, in any order; weight 0 marks an empty slot, whose other entries
    are ignored. Every knee position among a worker's points is tried and the leftmost of the best
    wins, so that a plain line gets no knee. The fit is exact for noise-free points of this shape if
    two distinct shares lie beyond the knee and one before it.

    Where fewer than two distinct shares lie on the line, the slope is undetermined: then
    `fixed_fraction` of the time at the largest share counts as fixed and the rest as proportional.

    Two columns keep noise out of the shape: `prior_weight` is the weight of `fixed_fraction`
    relative to the points, `knee_penalty` the squared error that a knee must save.
    """
    used = weight > 0
    if not used.any(axis=1).all():
        empty = int(used.any(axis=1).argmin())
        raise InvalidInputError(f"points of curve {empty}", "no points to fit; add a guess first")
    w, b, t = _sorted_by_share(shares, seconds, weight, used)
    largest = b[-1]

    # Row k of the arrays below puts the knee before the k-th point: k points are flat.
    flat_w, flat_t = _sums_before(w), _sums_before(w * t)
    line_w, line_t = _sums_from(w), _sums_from(w * t)
    floor = _ratio(flat_t, flat_w)

    # Shares are centred on the largest to avoid cancellation when they are close together.
    x = b - largest
    line_x, line_xx, line_xt = _sums_from(w * x), _sums_from(w * x * x), _sums_from(w * x * t)
    mean = np.where(line_w > 0, _ratio(line_t, line_w), floor)
    # The prior is one more point: `fixed_fraction` of the time at share zero.
    prior_t = fixed_fraction * mean
    line_w, line_t = line_w + prior_weight, line_t + prior_weight * prior_t
    line_x, line_xx = line_x - prior_weight * largest, line_xx + prior_weight * largest**2
    line_xt = line_xt - prior_weight * largest * prior_t
    slope = _ratio(line_w * line_xt - line_x * line_t, line_w * line_xx - line_x**2)
    fixed = _ratio(line_t, line_w) - slope * (_ratio(line_x, line_w) + largest)
    # A negative fixed cost is impossible: refit such a line through the origin.
    below_zero = fixed < 0
    slope = np.where(below_zero, _ratio(_sums_from(w * b * t), _sums_from(w * b * b)), slope)
    fixed = np.where(below_zero, 0.0, fixed)
    # Fewer than two distinct shares on the line.
    undetermined = np.concatenate([b, b[-1:]]) == largest
    slope = np.where(undetermined, (1.0 - fixed_fraction) * mean / largest, slope)
    fixed = np.where(undetermined, fixed_fraction * mean, fixed)

    # One knee at a time: small arrays stay in cache, which is faster than all at once.
    expected = (np.maximum(f, a + s * b) for f, a, s in zip(floor, fixed, slope, strict=True))
    error = np.array([(w * (e - t) ** 2).sum(axis=0) for e in expected])
    error[1:] += knee_penalty
    # A falling line is invalid; the last row, the flat part alone, always remains.
    error = np.where(slope > 0, error, np.inf)
    best = (error <= error.min(axis=0) + TIE * (w * t * t).sum(axis=0)).argmax(axis=0)

    at = best, np.arange(len(best))
    return FlatLinear(
        floor_s=floor[at],
        fixed_s=fixed[at],
        per_sample_s=np.maximum(slope[at], MIN_SLOPE * mean[at] / largest),
    )


def _sorted_by_share(
    shares: FloatArray, seconds: FloatArray, weight: FloatArray, used: Mask
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Weights, shares and times, one worker per column, smallest share first.

    Empty slots come last and repeat the largest share with weight 0.
    """
    largest = np.where(used, shares, -np.inf).max(axis=1, keepdims=True)
    order = np.argsort(np.where(used, shares, np.inf), axis=1, kind="stable")
    w, b, t = (
        np.ascontiguousarray(np.take_along_axis(np.where(used, column, fill), order, axis=1).T)
        for column, fill in ((weight, 0.0), (shares, largest), (seconds, 0.0))
    )
    return w, b, t


def _sums_before(column: FloatArray) -> FloatArray:
    """For each k, the sum over the first k points."""
    sums = np.zeros((len(column) + 1, column.shape[1]))
    np.cumsum(column, axis=0, out=sums[1:])
    return sums


def _sums_from(column: FloatArray) -> FloatArray:
    """For each k, the sum over all but the first k points."""
    return _sums_before(column[::-1])[::-1]


def _ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """The quotient, 0 where the denominator is not positive."""
    zeros = np.zeros_like(numerator)
    return np.divide(numerator, denominator, out=zeros, where=denominator > 0)
