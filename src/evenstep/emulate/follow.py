"""A schedule applied while something runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

from evenstep.emulate.schedule import Levels, Schedule

log = logging.getLogger(__name__)


class Follower:
    """Calls `apply` with the schedule's levels: once on entry, then at each change, from a thread.

    Seconds count from entry. What `apply` raises from the thread ends it and is raised on exit.
    """

    def __init__(self, schedule: Schedule, apply: Callable[[Levels], None]) -> None:
        self._changes, self._apply = schedule.changes(), apply
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="evenstep-schedule", daemon=True)
        self._error: Exception | None = None
        self._begun_s = 0.0

    def __enter__(self) -> Follower:
        self._begun_s = time.monotonic()
        self._apply(next(self._changes)[1])
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _follow(self) -> None:
        for due_s, levels in self._changes:
            left_s = due_s - (time.monotonic() - self._begun_s)
            if self._stop.wait(min(max(0.0, left_s), threading.TIMEOUT_MAX)):
                return
            try:
                self._apply(levels)
            except Exception as e:
                self._error = e
                log.exception("the schedule of unevenness ended at %.1f s", due_s)
                return
