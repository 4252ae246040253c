"""The run that a page shows: its journal, and its coordinator's status while one answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import islice
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

from evenstep.errors import EvenstepError, JournalError
from evenstep.observe.block import slowest
from evenstep.observe.history import History
from evenstep.observe.history.decisions import Decision
from evenstep.observe.pictures import PICTURES, View
from evenstep.observe.pictures.choose import colour
from evenstep.observe.pictures.labels import margin
from evenstep.observe.pictures.plot import drawn
from evenstep.observe.sinks.prometheus import exposition
from evenstep.page.commands import AskCoordinator
from evenstep.page.recorded import recorded_status
from evenstep.wire import MAX_BYTES

PATIENCE_S = 30.0
"""For a coordinator that does not answer any more: another may take over."""

GROWING_S = 10.0
"""A journal without a coordinator is being written if it grew in the last seconds."""

MAX_DECISIONS, MAX_LOOKED_AT = 8, 1000
"""The newest, beside a status, and how far back they are looked for."""

Status = dict[str, Any]

_PICTURES = {p.name: p for p in PICTURES}


class TimeSpan(NamedTuple):
    """A stretch of the run's own time."""

    begin_s: float
    end_s: float


class Watched:
    """Its calls block, and may come from any thread; a lock keeps reading and drawing apart.

    `ask` asks the coordinator; None for a journal without a run folder, which has none.
    """

    pictures: Mapping[str, Mapping[str, str]] = {
        p.name: {"title": p.title, "lacking": p.lacking} for p in PICTURES
    }

    def __init__(
        self,
        journal: Path,
        *,
        name: str,
        ask: AskCoordinator | None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = lambda: datetime.now().timestamp(),
    ) -> None:
        self.name, self.ask, self._journal = name, ask, journal
        self._clock, self._unix_clock = clock, unix_clock
        self._lock = threading.Lock()  # of the history
        self._reading = threading.Lock()  # of the journal: one thread reads it
        self._history: History | None = None
        self._opening: History | None = None  # while it is read for the first time
        self._unreadable = ""  # why there is no history, or no more of it
        self._followed_s = self._grew_s = -inf
        self._last: Status = {}  # what the coordinator last said
        self._answered_s = 0.0

    # The journal.

    def follow(self) -> dict[str, Any]:
        """Read new records of the journal; returns its span, number of steps and problem."""
        try:
            with self._reading:
                self._read()
        except (JournalError, OSError) as e:
            has_begun = self._history is not None or _has_lines(self._journal)
            has_begun = has_begun or self._last.get("step", -1) >= 0
            self._unreadable = str(e) if has_begun else ""
        with self._lock:
            if (history := self._history) is None:
                return {"begin_s": 0.0, "end_s": 0.0, "num_steps": 0, "problem": self._unreadable}
            begin_s, end_s = history.span
            num_steps = history.totals.num_steps
        return {
            "begin_s": begin_s,
            "end_s": end_s,
            "num_steps": num_steps,
            "problem": self._unreadable,
        }

    def _read(self) -> None:
        now_s, before_s = self._clock(), self._followed_s
        if self._history is None:
            self._opening = history = History.open(self._journal)
            try:
                history.follow()  # may take long: not under the lock
            finally:
                self._opening = None
            with self._lock:
                self._history = history
        else:
            with self._lock:
                num_new = self._history.follow()
            # Nobody follows a journal without viewers: new to us may still be old.
            if num_new and (now_s - before_s < GROWING_S or self._age_s() < GROWING_S):
                self._grew_s = now_s
        self._followed_s = now_s
        is_there = self._journal.exists()
        self._unreadable = "" if is_there else f"{self._journal}: is gone; this is what it had"

    def picture(self, name: str, window: TimeSpan, width: int) -> dict[str, Any]:
        """One picture as SVG, empty if there is nothing to draw, and the numbers in it."""
        wanted = _PICTURES[name]
        with self._lock:
            if self._history is None:
                return {"svg": "", "readout": []}
            begin_s, end_s = self._within(window)
            left = margin(self._history.workers)
            zero_s = self._history.span[0]
            view = View(begin_s=begin_s, end_s=end_s, width=width, left=left, zero_s=zero_s)
            plot = wanted.plot(self._history, view)
        if plot is None:
            return {"svg": "", "readout": []}
        svg = drawn(plot, view, name, wanted.title, wanted.says)
        return {"svg": str(svg), "readout": plot.readout()}

    def decision(self, index: int) -> dict[str, Any] | None:
        """One decision, with the numbers that it was taken on."""
        with self._lock:
            history = self._history
            found = history.decisions.get(index) if history is not None else None
            if history is None or found is None:
                return None
            return {
                **_row(found),
                "began_s": history.span[0],
                "num_decisions": history.decisions.num,
                "numbers": [
                    {name: _finite(value) for name, value in row.items()}
                    for row in history.numbers(found)
                ],
            }

    def _within(self, window: TimeSpan) -> tuple[float, float]:
        assert self._history is not None
        first_s, last_s = self._history.span
        begin_s = min(max(window.begin_s, first_s), last_s)
        return begin_s, max(min(window.end_s, last_s), begin_s)

    def _age_s(self) -> float:
        """Since the journal was last written."""
        try:
            return self._unix_clock() - self._journal.stat().st_mtime
        except OSError:
            return inf

    # The status.

    def status(self) -> Status:
        """The run at a glance: as its coordinator sees it, or as its journal has it."""
        told = self._ask()
        with self._lock:
            history, shown = self._history, told
            if shown is None:
                shown = recorded_status(
                    history,
                    has_journal=_has_lines(self._journal),
                    has_coordinator=self.ask is not None,
                    is_growing=self._clock() - self._grew_s < GROWING_S,
                )
            newest = _newest(history.decisions.kept) if history is not None else []
            problems = history.problems if history is not None and not self._unreadable else []
            if history is not None:
                rows = [_coloured(row, history) for row in shown["workers"]]
                shown = {**shown, "workers": rows}
        assert shown is not None
        slow = slowest(shown["workers"])
        return {
            **shown,
            "run": self.name,
            "reading": self._bytes_read(),
            "slowest": slow["worker"] if slow is not None else "",
            "began_s": history.span[0] if history is not None else 0.0,
            "newest": newest,
            "problems": [p for p in (*shown["problems"], self._unreadable, *problems) if p],
        }

    def _ask(self) -> Status | None:
        """The coordinator's status without its settings; None if there is none to ask.

        For a while after it fell silent, the last one: another coordinator may take over. Not if
        the journal has the end of the run.
        """
        if self.ask is None:
            return None
        try:
            told = self.ask("status")
        except (EvenstepError, OSError) as e:
            is_silent = not self._last or self._clock() - self._answered_s > PATIENCE_S
            if is_silent or self._is_over():
                return None
            silent = {"state": "no answer", "reason": "", "takes_commands": False}
            return {**self._last, **silent, "problems": [str(e)]}
        told.pop("settings", None)
        self._last = {**told, "is_live": True, "takes_commands": True}
        self._answered_s = self._clock()
        return self._last

    def _is_over(self) -> bool:
        """Whether the end of the run is in its journal by now."""
        if self._history is None:  # reading all of it would take too long
            return False
        self.follow()
        with self._lock:
            return bool(self._history.roster.left_because)

    def _bytes_read(self) -> tuple[int, int] | None:
        """Of a journal that is read for the first time, and how many it has."""
        opening = self._opening
        return opening.bytes_read if opening is not None else None

    def metrics(self) -> str:
        """The status as Prometheus reads it."""
        status = self.status()
        if not status["is_live"]:  # then it is in the journal, which may not have been read
            self.follow()
            status = self.status()
        return exposition(status)


def _has_lines(journal: Path) -> bool:
    """Whether anything was written; before that, the lack of a header is no fault."""
    try:
        with journal.open("rb") as file:
            return file.readline(MAX_BYTES).endswith(b"\n")
    except OSError:
        return False


def _newest(decisions: Sequence[Decision]) -> list[dict[str, Any]]:
    """The last decisions, oldest first; of plans one after the other the last, with their number.

    Else a few plans would hide that a worker was lost.
    """
    found: list[dict[str, Any]] = []
    for decision in islice(reversed(decisions), MAX_LOOKED_AT):
        if found and decision.kind == found[-1]["kind"] == "plan":
            found[-1]["num_before"] += 1
        elif len(found) == MAX_DECISIONS:
            break
        else:
            found.append({**_row(decision), "num_before": 0})
    return found[::-1]


def _row(decision: Decision) -> dict[str, Any]:
    row = asdict(decision)
    for name in ("workers", "before", "after"):
        row.pop(name)
    return row


def _coloured(row: dict[str, Any], history: History) -> dict[str, Any]:
    """A worker's row with the number of its colour in the pictures."""
    return {**row, "colour": colour(history, row["worker"])}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value
