"""Debounces signals: one request may arrive as two signals."""

from __future__ import annotations

import time
from collections.abc import Callable

DEBOUNCE_S = 1.0


class StopRequests:
    """Counts requests to stop; signals within DEBOUNCE_S of a counted one do not count.

    `timeout` and terminals signal both a process and its group, so the process gets two signals.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num = 0
        self._clock = clock
        self._counted_s = 0.0

    def count_signal(self) -> bool:
        """Count a signal; False if it repeats the last one."""
        now_s = self._clock()
        if self.num and now_s - self._counted_s < DEBOUNCE_S:
            return False
        self.num, self._counted_s = self.num + 1, now_s
        return True
