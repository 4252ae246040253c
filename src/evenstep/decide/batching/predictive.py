"""`predictive`: LB-BSP on CPUs, shares proportional to the speed forecast for the next step."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from evenstep.decide.batching.rules import (
    is_valid,
    measured_speed,
    relative_change,
    require,
    working_bounds,
)
from evenstep.decide.carry_over import carry_over, expected_speed, previous_rows
from evenstep.decide.split import in_proportion
from evenstep.ports import Move
from evenstep.types import Fleet, FloatArray, IntArray, Outcome, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PredictiveState:
    """The last forecast or measured speed of each worker, NaN before the first."""

    ids: tuple[WorkerId, ...]
    samples_per_s: FloatArray


class Predictive(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New shares every step, assuming that a share takes share / forecast speed."""

    dead_band_samples: int = 0  # keep the shares if none would change by more than this

    def __post_init__(self) -> None:
        require(
            self.dead_band_samples >= 0,
            "dead_band_samples",
            f"must not be negative, got {self.dead_band_samples}",
        )

    def first_shares(
        self, memory: PredictiveState | None, fleet: Fleet, batch: int
    ) -> tuple[PredictiveState, Move]:
        """Shares proportional to known speeds; new workers by their expected speed."""
        speed = np.full(len(fleet), np.nan)
        if memory is not None:
            speed = carry_over(memory.samples_per_s, previous_rows(memory.ids, fleet.ids))
        known = int(np.isfinite(speed).sum())
        memory = PredictiveState(ids=fleet.ids, samples_per_s=speed)
        shares = in_proportion(expected_speed(fleet, speed), batch, *working_bounds(fleet, batch))
        return memory, (shares, f"by speed, known for {known} of {len(fleet)} workers")

    def next(
        self, memory: PredictiveState, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[PredictiveState, Move | None]:
        """Shares proportional to forecasts; without one, to the last measured or known speed."""
        forecast = outcome.forecast_samples_per_s
        speed = np.where(np.isfinite(forecast), forecast, measured_speed(outcome))
        speed = np.where(np.isfinite(speed), speed, memory.samples_per_s)
        memory = PredictiveState(ids=fleet.ids, samples_per_s=speed)
        lower, upper = working_bounds(fleet, batch)
        speed = speed if np.isfinite(speed).all() else expected_speed(fleet, speed)
        wanted = in_proportion(speed, batch, lower, upper)
        if is_valid(shares, batch, lower, upper) and (
            int(np.abs(wanted - shares).max()) <= self.dead_band_samples
        ):
            return memory, None
        i = int(relative_change(shares, wanted).argmax())
        why = f"{fleet.ids[i]} is forecast at {speed[i]:.4g} samples/s: {shares[i]} -> {wanted[i]}"
        return memory, (wanted, why)

    def pace(self, memory: PredictiveState, fleet: Fleet, outcome: Outcome) -> FloatArray:
        """Samples per second, as in the paper."""
        return measured_speed(outcome)
