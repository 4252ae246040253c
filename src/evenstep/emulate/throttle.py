"""The fallback without CPU quotas: a worker slows itself down by waiting."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from evenstep.errors import InvalidInputError

log = logging.getLogger(__name__)

Clock = Callable[[], float]
Sleep = Callable[[float], None]

# Sleeps end 0.1 to 0.4 ms late; spinning for longer takes the core from other workers.
SPIN_S = 0.0003


def wait_until(
    deadline_s: float, *, clock: Clock = time.monotonic, sleep: Sleep = time.sleep
) -> float:
    """Wait until the clock reads `deadline_s`: sleep, then spin. Returns how late it is then."""
    while (left_s := deadline_s - clock()) > 0:
        if left_s > SPIN_S:
            sleep(left_s - SPIN_S)
    return -left_s


class Throttle:
    """Makes each step take `factor` times its compute time. `used`: whether it ever slept.

    The factor may be a function, called at each step, for unevenness that changes.
    """

    def __init__(
        self,
        factor: float | Callable[[], float],
        *,
        clock: Clock = time.monotonic,
        sleep: Sleep = time.sleep,
    ) -> None:
        self._factor = factor
        self._clock, self._sleep = clock, sleep
        self.used = False
        if not callable(factor):
            _checked(factor)

    @property
    def factor(self) -> float:
        """The current slowdown, 1 or more."""
        return _checked(self._factor() if callable(self._factor) else self._factor)

    def after(self, compute_s: float) -> float:
        """Sleep for the rest of the slowed-down step. Returns the step's total compute time.

        Call it after the compute and before the gradient reduction, so that the sleep counts as
        this worker's own compute time.
        """
        now_s, factor = self._clock(), self.factor
        if factor == 1 or compute_s <= 0:
            return compute_s
        if not self.used:
            self.used = True
            log.warning("no CPU quota: throttling in process, x%.3g by sleeping", factor)
        late_s = wait_until(now_s + (factor - 1) * compute_s, clock=self._clock, sleep=self._sleep)
        return factor * compute_s + late_s


def _checked(factor: float) -> float:
    if not 1 <= factor < float("inf"):
        raise InvalidInputError("factor", f"must be 1 or more and finite, got {factor}")
    return factor
