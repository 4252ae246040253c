"""Hands a run's figures to its sinks: one that is slow, hangs or raises holds up nothing else."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from evenstep.observe.figures import figures
from evenstep.ports import Sink

log = logging.getLogger("evenstep")

EVERY_S = 5.0
"""Between two writes."""

MAX_WAITING = 12
"""Writes that wait for a sink, a minute's; beyond that the oldest is dropped."""

CLOSE_S = 5.0
"""For all sinks together to write what waits as the run ends."""


class Moment(NamedTuple):
    """The arguments of one write."""

    unix_s: float
    step: int
    figures: Mapping[str, float]


class SinkFeed:
    """The sinks of a run; `offer` never waits for them."""

    def __init__(self, sinks: Mapping[str, Sink] | None = None) -> None:
        self._outlets = [Outlet(name, sink) for name, sink in (sinks or {}).items()]

    def __bool__(self) -> bool:
        return bool(self._outlets)

    def offer(self, status: Mapping[str, Any]) -> None:
        """The figures of a status to every sink, from the first step on."""
        if not self._outlets or status["step"] < 0:
            return
        moment = Moment(datetime.now().timestamp(), status["step"], figures(status))
        for outlet in self._outlets:
            outlet.put(moment)

    @property
    def problems(self) -> list[str]:
        """What is wrong with sinks at the moment."""
        return [outlet.problem for outlet in self._outlets if outlet.problem]

    def close(self, within_s: float = CLOSE_S) -> None:
        """Flush and close the sinks; abandon those that take longer than this."""
        for outlet in self._outlets:
            outlet.end()
        deadline_s = time.monotonic() + within_s
        for outlet in self._outlets:
            outlet.await_end(max(0.0, deadline_s - time.monotonic()))


class Outlet:
    """One sink with a thread of its own, and a bounded queue in front of it."""

    def __init__(self, name: str, sink: Sink) -> None:
        self._name, self._sink = name, sink
        self._waiting: deque[Moment] = deque()
        self._changed = threading.Condition()
        self._is_ending = self._is_reported = False
        self._num_put = self._num_lost = 0
        self._problem = ""
        # A daemon: a sink that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        """Why writes are lost at the moment, and how many were; empty if all is well."""
        with self._changed:
            return f"{self._problem}; {self._lost()}" if self._problem else ""

    def put(self, moment: Moment) -> None:
        """Have the thread write this; if it is far behind, the oldest figures are dropped."""
        with self._changed:
            self._num_put += 1
            self._waiting.append(moment)
            is_behind = len(self._waiting) > MAX_WAITING
            if is_behind:
                self._waiting.popleft()
            self._changed.notify()
        if is_behind:
            self._failed(f"does not keep up: {MAX_WAITING} writes wait for it")

    def end(self) -> None:
        """Have the thread write what waits, and close the sink."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def await_end(self, within_s: float) -> None:
        """Wait for the sink to be closed, but no longer than this."""
        self._thread.join(within_s)
        with self._changed:
            num_waiting, lost, num_lost = len(self._waiting), self._lost(), self._num_lost
        if self._thread.is_alive():
            text = "sink %s has not finished: it is left behind, and %d writes still wait; %s"
            log.warning(text, self._name, num_waiting, lost)
        elif num_lost > 1:  # of a single one the log has told
            log.warning("sink %s: %s", self._name, lost)

    def _run(self) -> None:
        while (moment := self._next()) is not None:
            try:
                self._sink.write(*moment)
            except BaseException as e:
                self._failed(f"failed: {type(e).__name__}: {e}")
            else:
                self._succeeded()
        try:
            self._sink.close()
        except BaseException as e:
            log.warning("sink %s could not be closed: %s: %s", self._name, type(e).__name__, e)

    def _next(self) -> Moment | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_ending)
            return self._waiting.popleft() if self._waiting else None

    def _failed(self, what: str) -> None:
        with self._changed:
            self._num_lost += 1
            self._problem = f"sink {self._name} {what}"
            is_news, self._is_reported = not self._is_reported, True
        if is_news:  # outside of the lock: a log that blocks must not block `put`
            log.warning("%s; the run goes on, and the next figures are tried again", self._problem)

    def _succeeded(self) -> None:
        with self._changed:
            if not self._waiting:  # it has caught up
                self._problem = ""

    def _lost(self) -> str:
        return f"{self._num_lost} of {self._num_put} writes are lost"
