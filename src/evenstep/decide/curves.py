"""Step-time curves: seconds each worker of a fleet takes for a share, as columns.

A share of zero takes no time. From one sample on, time never decreases as the share grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenstep.errors import InvalidInputError
from evenstep.types import MOST_SAMPLES, FloatArray, IntArray

Mask = NDArray[np.bool_]

MAX_SHARE = np.int64(MOST_SAMPLES)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatLinear:
    """`max(floor_s, fixed_s + per_sample_s * share)`: flat up to the knee, then linear.

    A GPU is flat below saturation; a CPU is linear throughout, with a fixed cost per step.
    """

    floor_s: FloatArray
    fixed_s: FloatArray
    per_sample_s: FloatArray

    def __post_init__(self) -> None:
        for name in ("floor_s", "fixed_s", "per_sample_s"):
            column = getattr(self, name)
            bad = ~(np.isfinite(column) & (column >= 0))
            if bad.any():
                i = int(bad.argmax())
                raise InvalidInputError(
                    f"curve {i}: {name}", f"must be 0 or more and finite, got {column[i]}"
                )

    @classmethod
    def at_speed(cls, samples_per_s: FloatArray) -> FlatLinear:
        """Lines through the origin: time proportional to the share."""
        bad = samples_per_s[~(np.isfinite(samples_per_s) & (samples_per_s > 0))]
        if len(bad):
            raise InvalidInputError("samples_per_s", f"must be above 0 and finite, got {bad[0]}")
        zero = np.zeros(len(samples_per_s))
        return cls(floor_s=zero, fixed_s=zero, per_sample_s=1.0 / samples_per_s)

    def scaled(self, factor: FloatArray) -> FlatLinear:
        """The curves of workers that take `factor` times as long."""
        return FlatLinear(
            floor_s=self.floor_s * factor,
            fixed_s=self.fixed_s * factor,
            per_sample_s=self.per_sample_s * factor,
        )

    def seconds(self, shares: IntArray) -> FloatArray:
        line = self.fixed_s + self.per_sample_s * shares
        return np.where(shares > 0, np.maximum(self.floor_s, line), 0.0)

    def max_shares(self, deadline_s: float) -> IntArray:
        with np.errstate(divide="ignore", invalid="ignore"):
            exact = (deadline_s - self.fixed_s) / self.per_sample_s
        # 0/0: samples cost nothing and the fixed cost exactly meets the deadline.
        exact = np.where(np.isnan(exact), float(MAX_SHARE), exact)
        share = np.minimum(np.maximum(np.floor(exact), 0.0), float(MAX_SHARE)).astype(np.int64)
        # Division rounds: correct by one sample so that this agrees with `seconds`.
        share += self.seconds(np.minimum(share + 1, MAX_SHARE)) <= deadline_s
        share = np.minimum(share, MAX_SHARE)
        share -= (share > 0) & (self.seconds(share) > deadline_s)
        return np.where(self.floor_s <= deadline_s, share, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnyMonotone:
    """Curves given as a function of all shares at once, inverted by bisection."""

    function: Callable[[IntArray], FloatArray]
    upper: IntArray  # largest share ever evaluated

    def seconds(self, shares: IntArray) -> FloatArray:
        return np.where(shares > 0, self.function(shares), 0.0)

    def max_shares(self, deadline_s: float) -> IntArray:
        low, high = np.zeros_like(self.upper), self.upper.copy()
        while (low < high).any():
            middle = (low + high + 1) // 2
            fits = self.seconds(middle) <= deadline_s
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        return low
