"""`predictive`: LB-BSP on CPUs, shares in proportion to the speed forecast for the coming step."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from evenstep.decide.batching.rules import (
    hold,
    measured_speed,
    relative_change,
    require,
    working_bounds,
)
from evenstep.decide.seat import carry, expected_speed, follow
from evenstep.decide.split import in_proportion
from evenstep.ports import Move
from evenstep.types import Fleet, FloatArray, IntArray, Outcome, WorkerId

SLOWEST_PER_S, FASTEST_PER_S = 1e-9, 1e18
"""Forecasts beyond these are clamped to them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """The speed last told of each worker, NaN where there was none yet."""

    ids: tuple[WorkerId, ...]
    samples_per_s: FloatArray


class Predictive(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New shares every step: a worker's time is taken to be its share over its forecast speed."""

    dead_band_samples: int = 0  # shares are kept while none would change by more than this

    def __post_init__(self) -> None:
        require(
            self.dead_band_samples >= 0,
            "dead_band_samples",
            f"must not be negative, got {self.dead_band_samples}",
        )

    def seat(self, memory: Memory | None, fleet: Fleet, batch: int) -> tuple[Memory, Move]:
        """By the speeds known; of new workers, by what is expected of them."""
        speed = np.full(len(fleet), np.nan)
        if memory is not None:
            speed = carry(memory.samples_per_s, follow(memory.ids, fleet.ids))
        known = int(np.isfinite(speed).sum())
        memory = Memory(ids=fleet.ids, samples_per_s=speed)
        shares = in_proportion(expected_speed(fleet, speed), batch, *working_bounds(fleet, batch))
        return memory, (shares, f"in proportion to speed, known of {known} of {len(fleet)} workers")

    def next(
        self, memory: Memory, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[Memory, Move | None]:
        """In proportion to the forecasts; without one, to the last speed measured or known."""
        forecast = outcome.forecast_samples_per_s
        usable = np.isfinite(forecast) & (forecast > 0)
        told = np.clip(forecast, SLOWEST_PER_S, FASTEST_PER_S)
        told = np.where(usable, told, measured_speed(outcome))
        told = np.where(np.isfinite(told), told, memory.samples_per_s)
        memory = Memory(ids=fleet.ids, samples_per_s=told)
        lower, upper = working_bounds(fleet, batch)
        speed = told if np.isfinite(told).all() else expected_speed(fleet, told)
        wanted = in_proportion(speed, batch, lower, upper)
        if hold(shares, batch, lower, upper) and (
            int(np.abs(wanted - shares).max()) <= self.dead_band_samples
        ):
            return memory, None
        i = int(relative_change(shares, wanted).argmax())
        why = f"{fleet.ids[i]} is expected at {speed[i]:.4g} samples/s: {shares[i]} -> {wanted[i]}"
        return memory, (wanted, why)

    def pace(self, memory: Memory, fleet: Fleet, outcome: Outcome) -> FloatArray:
        """Plain speed, as the paper has it."""
        return measured_speed(outcome)
