"""Emulated devices: wait out a step-time curve with a knee; refuse shares beyond their memory."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from evenstep.emulate.throttle import Clock, Sleep, wait_until
from evenstep.errors import EvenstepError, InvalidInputError


class DeviceMemoryError(EvenstepError, MemoryError):
    """An emulated device was given more samples than it holds."""

    def __init__(self, samples: int, cap: int) -> None:
        super().__init__(samples, cap)
        self.samples, self.cap = samples, cap

    def __str__(self) -> str:
        return (
            f"out of memory: {self.samples} samples on an emulated device that holds {self.cap}. "
            "Give this worker a smaller share or a cap."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCurve:
    """A device on which b samples take max(`floor_s`, `fixed_s` + `per_sample_s` * b).

    More than `cap` samples do not fit. A share of zero takes no time.
    """

    per_sample_s: float
    fixed_s: float = 0.0
    floor_s: float = 0.0
    cap: int | None = None

    def __post_init__(self) -> None:
        for name in ("per_sample_s", "fixed_s", "floor_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InvalidInputError(
                    f"device: {name}", f"must be 0 or more and finite, got {value}"
                )
        if self.cap is not None and self.cap < 1:
            raise InvalidInputError("device: cap", f"must be 1 or more, got {self.cap}")

    def slowed(self, factor: float) -> DeviceCurve:
        """The same device, `factor` times as slow."""
        return replace(
            self,
            per_sample_s=self.per_sample_s * factor,
            fixed_s=self.fixed_s * factor,
            floor_s=self.floor_s * factor,
        )

    def seconds(self, samples: int) -> float:
        """Step time for this many samples; DeviceMemoryError if they do not fit."""
        if self.cap is not None and samples > self.cap:
            raise DeviceMemoryError(samples, self.cap)
        if samples <= 0:
            return 0.0
        return max(self.floor_s, self.fixed_s + self.per_sample_s * samples)

    def run(
        self,
        samples: int,
        started_s: float,
        *,
        clock: Clock = time.monotonic,
        sleep: Sleep = time.sleep,
    ) -> float:
        """Wait until a step that started at `started_s` is done. Returns how late it was done.

        Lateness far above 0 means that the real compute took longer than the curve: then the
        figures describe this machine, not the device.
        """
        return wait_until(started_s + self.seconds(samples), clock=clock, sleep=sleep)
