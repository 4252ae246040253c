"""The result of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.types import FloatArray

NEAR = 1.02
"""A step within 2 % of the limit counts as at the limit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """One policy on one scenario. Arrays have one entry per committed step."""

    policy: str
    time_s: float
    samples: int
    cost: float
    wait_fraction: float  # of the workers' time in steps, spent waiting for slower workers
    num_void_steps: int
    step_s: FloatArray  # with noise
    expected_s: FloatArray  # the same without noise
    limit_s: FloatArray  # with the best shares, without noise
    achieved: float | None = None  # throughput relative to a run of the limit

    @property
    def num_steps(self) -> int:
        """Number of committed steps."""
        return len(self.step_s)

    @property
    def samples_per_s(self) -> float:
        """Throughput over the whole run, transitions included."""
        return self.samples / self.time_s

    @property
    def settled_step(self) -> int | None:
        """The first step from which 95 % of the steps are within 2 % of the limit."""
        return settled(self.expected_s <= NEAR * self.limit_s)


def settled(near: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], min_num: int = 20) -> int | None:
    """The first index from which 95 % of `near` hold, over at least `min_num` entries."""
    if len(near) < min_num:
        min_num = max(1, len(near))
    holds = np.cumsum(near[::-1])[::-1]  # count from each index on
    left = np.arange(len(near), 0, -1)
    found = np.flatnonzero((holds >= 0.95 * left) & (left >= min_num) & near)
    return int(found[0]) if len(found) else None
