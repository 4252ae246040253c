"""Precise waiting: sleep first, then spin, because sleeps overshoot."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
Sleep = Callable[[float], None]

# Sleeps end 0.1 to 0.4 ms late; spinning for longer takes the core from other workers.
SPIN_S = 0.0003


def wait_until(
    deadline_s: float, *, clock: Clock = time.monotonic, sleep: Sleep = time.sleep
) -> float:
    """Wait until the clock reads `deadline_s`. Returns how late it is then."""
    while (left_s := deadline_s - clock()) > 0:
        if left_s > SPIN_S:
            sleep(left_s - SPIN_S)
    return -left_s
