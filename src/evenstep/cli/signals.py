"""Debounce signals: one request may arrive twice."""

from __future__ import annotations

import time
from collections.abc import Callable

SAME_S = 1.0


class Requests:
    """Counts requests. Signals within SAME_S of the one that was counted are the same request.

    `timeout` and terminals send a signal to a process and to its group, so that it comes twice.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num = 0
        self._clock = clock
        self._counted_s = 0.0

    def count_signal(self) -> bool:
        """Count a signal; False if it repeats the last one."""
        now_s = self._clock()
        if self.num and now_s - self._counted_s < SAME_S:
            return False
        self.num, self._counted_s = self.num + 1, now_s
        return True
