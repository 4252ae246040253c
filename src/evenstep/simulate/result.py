"""What came out of a virtual run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.types import FloatArray

NEAR = 1.02
"""Within 2 % of the limit counts as there."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """One policy on one scenario. Arrays have one entry per committed step."""

    policy: str
    time_s: float
    samples: int
    cost: float
    wait_fraction: float  # of the workers' time in steps, spent waiting for slower ones
    num_plans: int
    num_regroups: int
    num_void_steps: int
    step_s: FloatArray  # as it was, chance included
    expected_s: FloatArray  # the same without chance
    limit_s: FloatArray  # what the best shares would have taken, without chance
    achieved: float | None = None  # throughput over that of the limit's own run

    @property
    def num_steps(self) -> int:
        """How many steps were committed."""
        return len(self.step_s)

    @property
    def samples_per_s(self) -> float:
        """Throughput over the whole run, transitions included."""
        return self.samples / self.time_s

    @property
    def settled_step(self) -> int | None:
        """The first step from which on 95 % of all steps are within 2 % of the limit."""
        return settled(self.expected_s <= NEAR * self.limit_s)


def settled(near: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], least: int = 20) -> int | None:
    """The first index from which on 95 % of `near` hold, over at least `least` entries."""
    if len(near) < least:
        least = max(1, len(near))
    holds = np.cumsum(near[::-1])[::-1]  # how many hold from each index on
    left = np.arange(len(near), 0, -1)
    found = np.flatnonzero((holds >= 0.95 * left) & (left >= least) & near)
    return int(found[0]) if len(found) else None
