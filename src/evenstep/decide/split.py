"""The min-max solver: integer shares with an exact sum whose latest finish is the earliest.

Optimal for any monotone curves and any bounds, and deterministic: equal inputs give equal shares on
every machine, ties going to the first in order.
"""

from __future__ import annotations

import numpy as np

from evenstep.decide.curves import Curves, FlatLinear
from evenstep.errors import BatchBoundsError, InvalidInputError
from evenstep.types import FloatArray, IntArray

LAYERS = 4
"""How near the search brings each worker's share before single samples are compared."""


def split(curves: Curves, batch: int, lower: IntArray, upper: IntArray) -> IntArray:
    """Shares between the bounds that add up to `batch` and minimise the slowest worker's time.

    A worker gets zero where `lower` allows it and one sample would already be too late. Among equal
    workers the first get the odd samples.
    """
    check_bounds(batch, lower, upper)
    # Equal shares, as far as the bounds allow, are one way to finish; no time at all is too little.
    low_s, high_s = 0.0, float(curves.seconds(water_fill(batch, lower, upper)).max())
    low = _between(curves.within(low_s), lower, upper)
    high = _between(curves.within(high_s), lower, upper)
    if int(low.sum()) >= batch:
        return water_fill(batch, lower, low)
    turn = 0
    while (high - low).max() > LAYERS:
        below, above = batch - int(low.sum()), int(high.sum()) - batch
        if above == 0:
            return high  # an earlier deadline that holds the batch would give the same shares
        # Interpolation is fast where curves are straight, halving is sure where they are not.
        middle_s = low_s + (high_s - low_s) * (below / (below + above + 1) if turn < 2 else 0.5)
        if turn == 1 or not low_s < middle_s < high_s:
            # Where curves bend or jump, go by the times at which workers finish one sample more.
            soon = np.sort(curves.seconds(low + 1)[low < high])
            if soon[0] >= high_s:
                return water_fill(batch, low, high)  # all that is left finishes at once
            middle_s = float(soon[soon < high_s][np.count_nonzero(soon < high_s) // 2])
        middle = _between(curves.within(middle_s), lower, upper)
        surplus = int(middle.sum()) - batch
        if surplus < 0:
            low_s, low = middle_s, middle
        else:
            high_s, high = middle_s, middle
        slow = abs(surplus) > (below if surplus < 0 else above) / 2
        turn = (turn + 1) % 3 if slow or turn else 0
    return _earliest(curves, batch, low, high)


def in_proportion(speed: FloatArray, batch: int, lower: IntArray, upper: IntArray) -> IntArray:
    """Shares in proportion to speed, as near as integers and bounds allow."""
    return split(FlatLinear.at_speed(speed), batch, lower, upper)


def check_bounds(batch: int, lower: IntArray, upper: IntArray) -> None:
    """Raise unless the bounds can hold the batch, saying by how much they cannot."""
    if batch < 1:
        raise InvalidInputError("batch", f"must be 1 or more, got {batch}")
    if (lower < 0).any() or (lower > upper).any():
        i = int(((lower < 0) | (lower > upper)).argmax())
        raise InvalidInputError(f"bounds of worker {i}", f"{lower[i]} to {upper[i]} is no range")
    least, most = int(lower.sum()), int(upper.sum())
    if not least <= batch <= most or len(lower) == 0:
        raise BatchBoundsError(batch, least, most, len(lower))


def _earliest(curves: Curves, batch: int, low: IntArray, high: IntArray) -> IntArray:
    """`low`, and of the samples between it and `high` those that finish first."""
    layers = [low + k for k in range(1, int((high - low).max()) + 1)]
    if not layers:
        return low
    worker = np.concatenate([np.flatnonzero(layer <= high) for layer in layers])
    share = np.concatenate([layer[layer <= high] for layer in layers])
    finish_s = np.concatenate([curves.seconds(layer)[layer <= high] for layer in layers])
    # Smaller shares first among equal finishes, so that a faster worker never gets less.
    order = np.lexsort((worker, share, finish_s))[: batch - int(low.sum())]
    return low + np.bincount(worker[order], minlength=len(low))


def water_fill(batch: int, low: IntArray, high: IntArray) -> IntArray:
    """The most even shares between the bounds that add up to the batch."""
    # Everyone stands at the water level or at a bound: find the highest level that does not spill.
    bottom, top = int(low.min()), int(high.max())
    fair = batch // len(low)
    if (low <= fair).all() and (fair < high).all():
        bottom = top = fair  # no bound is in the way
    while bottom < top:
        level = (bottom + top + 1) // 2
        if int(_between(level, low, high).sum()) <= batch:
            bottom = level
        else:
            top = level - 1
    shares: IntArray = _between(bottom, low, high)
    thirsty = np.flatnonzero((shares == bottom) & (shares < high))
    shares[thirsty[: batch - int(shares.sum())]] += 1
    return shares


def _between(shares: IntArray | int, low: IntArray, high: IntArray) -> IntArray:
    """`np.clip`, which takes three times as long for the few numbers that there mostly are."""
    return np.minimum(np.maximum(shares, low), high)
