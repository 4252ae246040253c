"""Applies a schedule while something runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from evenstep.emulate.schedule import Levels, Schedule

log = logging.getLogger(__name__)


class ScheduleRunner:
    """Calls `apply` with the schedule's levels: once on entry, then at each change, from a thread.

    Time is in seconds since entry. If `apply` raises in the thread, the thread ends and the error
    is raised again on exit.
    """

    def __init__(self, schedule: Schedule, apply: Callable[[Levels], None]) -> None:
        self._changes, self._apply = schedule.changes(), apply
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evenstep-schedule", daemon=True)
        self._error: Exception | None = None
        self._started_s = 0.0

    def __enter__(self) -> ScheduleRunner:
        self._started_s = time.monotonic()
        self._apply(next(self._changes)[1])
        self._thread.start()
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        for due_s, levels in self._changes:
            left_s = due_s - (time.monotonic() - self._started_s)
            if self._stop.wait(min(max(0.0, left_s), threading.TIMEOUT_MAX)):
                return
            try:
                self._apply(levels)
            except Exception as e:
                self._error = e
                log.exception("the emulation schedule stopped at %.1f s", due_s)
                return
