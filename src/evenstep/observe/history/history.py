"""`History`: the columns of a run, built record by record, or read from its journal.

Memory is bounded: in long runs neighbouring steps are merged, so that at most `MAX_CELLS` numbers
are kept, or one row for each generation if that is more.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, Self

import numpy as np
from msgspec import structs

from evenstep.config import Settings
from evenstep.decide.learning_rate import GradientNoise, observe_noise, step_noise
from evenstep.errors import JournalError
from evenstep.journal import Record
from evenstep.observe.history.decisions import Decision, Decisions, happened
from evenstep.observe.history.lines import JournalLines, LeanRecord, LeanStep, Row
from evenstep.observe.history.roster import RosterTimes
from evenstep.observe.history.stretch import CELL, COMPUTE, PACE, WAIT, Stretch
from evenstep.observe.history.window import RunWindow, thinned
from evenstep.observe.tally import Tally, Totals
from evenstep.types import Estimate, FloatArray, Joined, StepDone, WorkerId

MAX_CELLS = 12_000_000
"""Numbers of workers in steps: 48 MB, half a million steps of four workers at full resolution."""

MAX_ESTIMATES = 100_000

JOURNAL = "journal.jsonl"
"""In the folder of a run."""


class History:
    """A run so far: `add` appends records, `read` and `follow` take them from a journal."""

    def __init__(
        self,
        settings: Settings | None = None,
        about: dict[str, Any] | None = None,
        *,
        max_cells: int = MAX_CELLS,
    ) -> None:
        self.settings, self.about = settings, about or {}
        self.name = ""  # as people know the run
        self.tally, self.roster, self.decisions = Tally(), RosterTimes(), Decisions()
        self.began_s: float | None = None
        self.ended_s = 0.0  # the last record
        self.order: dict[WorkerId, int] = {}  # every worker, in the order in which they came
        self._max_cells, self._num_cells = max_cells, 0
        self._stretches: list[Stretch] = []
        self._estimates = array("d")  # rows of (at_s, equal, limit)
        self._noise = GradientNoise()
        self._lines: JournalLines | None = None
        self._window: tuple[tuple[float, float, int], RunWindow] | None = None  # the last one asked

    @classmethod
    def read(cls, path: Path | str, *, max_cells: int = MAX_CELLS) -> Self:
        """The run of a journal, or of a run's folder, as far as it is written.

        Raises JournalError if that is no journal, or of a version that this one does not read.
        Other faults are listed in `problems`.
        """
        history = cls.open(path, max_cells=max_cells)
        history.follow()
        return history

    @classmethod
    def open(cls, path: Path | str, *, max_cells: int = MAX_CELLS) -> Self:
        """The same before its records are read: `follow` reads them."""
        path = Path(path)
        if path.is_dir() and not (path / JOURNAL).exists():
            raise JournalError(str(path), 0, f"has no {JOURNAL}: it is no run, or has not begun")
        lines = JournalLines(path / JOURNAL if path.is_dir() else path)
        history = cls(lines.header.settings, lines.header.about, max_cells=max_cells)
        history.name = path.resolve().name if path.is_dir() else path.stem
        history._lines = lines
        return history

    @property
    def bytes_read(self) -> tuple[int, int]:
        """Of its journal so far, and how many that has; from any thread."""
        return self._lines.bytes_read if self._lines is not None else (0, 0)

    def follow(self) -> int:
        """Read the records added since; returns how many."""
        num, lines = 0, self._lines
        if lines is None:
            return 0
        if lines.is_replaced:
            fresh = type(self).read(lines.path, max_cells=self._max_cells)
            name = self.name
            self.__dict__ = fresh.__dict__
            self.name = name
            return self.tally.totals.num_steps
        for record in lines.new():
            try:
                self._add_lean(record) if isinstance(record, LeanRecord) else self.add(record)
            except (TypeError, ValueError, OverflowError) as e:
                lines.refuse(f"makes no sense: {e}")
            num += 1
        return num

    @property
    def problems(self) -> list[str]:
        """Why the history is incomplete, for people."""
        found = []
        if self._lines is not None and self._lines.problem:
            found.append(self._lines.problem)
        elif self._lines is not None and self._lines.is_torn:
            found.append("the last line is not complete and was left out")
        if self.decisions.num_dropped:
            num = self.decisions.num_dropped
            found.append(f"{num:,} older plans are left out, to save memory")
        return found

    @property
    def totals(self) -> Totals:
        """The figures of the summary."""
        return self.tally.totals

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Every worker there ever was, in the order in which they came."""
        return tuple(self.order)

    @property
    def span(self) -> tuple[float, float]:
        """From its first record to its last."""
        return self.began_s or 0.0, self.ended_s

    def between(self, begin_s: float, end_s: float, points: int) -> RunWindow:
        """The steps between two times, thinned to about so many points."""
        wanted = (begin_s, end_s, points)
        if self._window is None or self._window[0] != wanted:
            found = [s for s in self._stretches if s.last_s >= begin_s]
            self._window = wanted, thinned(found, self.order, begin_s, end_s, max(1, points))
        return self._window[1]

    def estimates(self, begin_s: float, end_s: float, points: int) -> FloatArray:
        """Rows of (at_s, throughput of equal shares, of the limit), thinned by means.

        The first one holds at `begin_s` already, if there is one before.
        """
        rows = np.frombuffer(self._estimates).reshape(-1, 3)
        first = max(0, int(np.searchsorted(rows[:, 0], begin_s, "right")) - 1)
        rows = rows[first : int(np.searchsorted(rows[:, 0], end_s, "right"))].copy()
        rows[:, 0] = np.maximum(rows[:, 0], begin_s)
        if len(rows) <= points:
            return rows
        starts = np.arange(0, len(rows), -(-len(rows) // points))
        sizes = np.diff(np.append(starts, len(rows)))
        return np.asarray(np.add.reduceat(rows, starts) / sizes[:, None])

    def numbers(self, decision: Decision) -> list[dict[str, Any]]:
        """For each worker, what a decision was made on: its last step before, forecasts, shares."""
        behind: dict[WorkerId, dict[str, float | None]] = {}
        parts = [s for s in self._stretches if s.first_s <= decision.at_s]
        if parts:
            part = parts[-1]
            last, following = part.around(decision.at_s)
            for i, worker in enumerate(part.workers):
                behind[worker] = {
                    "compute_s": float(last[COMPUTE, i]),
                    "wait_s": float(last[WAIT, i]),
                    "pace": _known(last[PACE, i]),
                    "forecast": _known(following[i]),
                }
        before = dict(zip(decision.workers, decision.before, strict=False))
        after = dict(zip(decision.workers, decision.after, strict=False))
        empty = dict.fromkeys(("compute_s", "wait_s", "pace", "forecast"))
        workers = sorted({*behind, *decision.workers}, key=lambda w: self.order.get(w, 0))
        return [
            {"worker": worker, "before": before.get(worker), "after": after.get(worker)}
            | behind.get(worker, empty)
            for worker in workers
        ]

    def add(self, record: Record) -> None:
        """One more record, as it is in the journal."""
        event = record.event
        if isinstance(event, StepDone):
            rows = [structs.astuple(report) for report in event.reports]
            self._add_step(record, event, rows)
            return
        self._advance(record.at_s)
        self.tally.add(record)
        self.roster.add(record.at_s, event)
        self.roster.decided(record.at_s, record.actions)
        self.decisions.add(record.at_s, happened(event), record.actions)
        if isinstance(event, Joined):
            for worker in event.workers:
                self.order.setdefault(worker.id, len(self.order))

    def _add_lean(self, record: LeanRecord) -> None:
        """The same for a record whose step has plain rows."""
        event = record.event
        if isinstance(event, LeanStep):
            self._add_step(record, event, event.reports)
        else:
            self.add(Record(at_s=record.at_s, event=event, actions=record.actions))

    def _add_step(
        self, record: Record | LeanRecord, done: StepDone | LeanStep, reports: Sequence[Row]
    ) -> None:
        at_s, actions, quiet = record.at_s, record.actions, done.quiet
        if not reports:
            raise ValueError(f"step {done.step} has no reports")
        names, samples, compute_s, wait_s, _, _, norms, _ = zip(*reports, strict=True)
        if not isfinite(done.seconds):
            raise ValueError(f"step {done.step} took {done.seconds} s")
        part = self._stretch(done.generation, names)
        forecasts, paces = _or_nan(done.forecasts, names), _or_nan(record.paces or None, names)
        seconds, own = done.seconds + quiet.seconds, sum(samples)
        before_s = self.ended_s if self.began_s is not None else at_s - seconds
        self._advance(at_s)
        self.tally.add_steps(record, done, own)
        self.decisions.stepped(at_s, done.step, actions)
        if actions:
            self.roster.decided(at_s, actions)
        if record.estimate:
            self._add_estimate(record.estimate)
        if done.grad_squared_norm > 0 and min(norms) >= 0:
            self._observe_noise(samples, norms, done.grad_squared_norm)
        noise, weight = self._noise, self._noise.weight
        row = (
            self.ended_s,
            min(max(before_s, self.ended_s - seconds), self.ended_s),
            1 + quiet.num,
            seconds,
            own + max(0, quiet.samples - done.earlier.samples),
            done.seconds,
            done.seconds,
            done.step,
            done.position,
            done.idle_s,
            noise.signal / weight if weight else nan,
            noise.noise / weight if weight else nan,
            done.generation,
        )
        if not len(part):
            self._begin(part)
        part.append(row, samples, compute_s, wait_s, part.foreseen, paces)
        part.foreseen = forecasts
        self._num_cells += len(CELL) * len(names)
        if self._num_cells > self._max_cells:
            self._halve()

    def _stretch(self, generation: int, workers: tuple[WorkerId, ...]) -> Stretch:
        """The stretch of a roster, a new one if it has changed."""
        last = self._stretches[-1] if self._stretches else None
        if last is not None and last.workers == workers and last.generation == generation:
            return last
        if len(set(workers)) < len(workers):
            raise ValueError("a worker has two reports")
        return Stretch(generation, workers)

    def _begin(self, part: Stretch) -> None:
        self._stretches.append(part)
        for worker in part.workers:
            self.order.setdefault(worker, len(self.order))

    def _halve(self) -> None:
        for part in self._stretches:
            part.halve()
        num_cells = sum(part.num_cells for part in self._stretches)
        if num_cells > self._max_cells // 2:  # one row for each of many generations
            self._max_cells = 2 * num_cells
        self._num_cells = num_cells

    def _add_estimate(self, now: Estimate) -> None:
        self._estimates.extend((self.ended_s, now.equal, now.limit))
        if len(self._estimates) > 3 * MAX_ESTIMATES:
            fewer = self.estimates(-inf, inf, MAX_ESTIMATES // 2)
            self._estimates = array("d", fewer.tobytes())

    def _observe_noise(
        self, samples: Sequence[int], norms: Sequence[float], mean_norm: float
    ) -> None:
        """As the brain does: if every worker with a share reported a gradient norm."""
        known = [(n, norm) for n, norm in zip(samples, norms, strict=True) if n > 0]
        if known and min(norm for _, norm in known) > 0:
            found = step_noise([n for n, _ in known], [norm for _, norm in known], mean_norm)
            self._noise = observe_noise(self._noise, found)

    def _advance(self, at_s: float) -> None:
        if not isfinite(at_s):
            raise ValueError(f"its time is {at_s}")
        if self.began_s is None:
            self.began_s = self.ended_s = at_s
        self.ended_s, self._window = max(self.ended_s, at_s), None


def _or_nan(column: tuple[Any, ...] | None, workers: Sequence[WorkerId]) -> Sequence[float]:
    if column is None:
        return (nan,) * len(workers)
    if len(column) != len(workers):
        raise ValueError(f"{len(column)} forecasts for {len(workers)} reports")
    return [nan if x is None else x for x in column] if None in column else column


def _known(value: float) -> float | None:
    return float(value) if isfinite(value) else None
