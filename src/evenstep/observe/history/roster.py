"""When each worker joined and ended, and what happened to it in between."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evenstep.types import (
    AnyAction,
    AnyEvent,
    Drain,
    Joined,
    Launch,
    Left,
    Lost,
    Pause,
    Plan,
    Worker,
    WorkerId,
)

REPLACE, REPLACED = "replace ", "replaced by "
"""How the reasons begin for which a straggler is named, and asked to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """One worker, from its join to its end."""

    worker: WorkerId
    kind: str
    begin_s: float
    end_s: float | None = None  # None: it is there
    end: str = ""  # left or lost
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened to a worker."""

    at_s: float
    worker: WorkerId
    what: str  # straggler or drain
    reason: str


class RosterTimes:
    """Follows the roster, record by record."""

    def __init__(self) -> None:
        self.presences: list[Presence] = []
        self.marks: list[Mark] = []
        self.sizes: list[tuple[float, int]] = []  # (from when, number of workers)
        self.costs: list[tuple[float, float, float]] = []  # (when, cost so far, price per second)
        self.pauses: list[tuple[float, float | None, str]] = []  # (from, to, reason)
        self.left_because = ""  # all workers, in order; empty: some are there, or were lost
        self._there: dict[WorkerId, int] = {}  # index of its presence
        self._prices: dict[WorkerId, float] = {}

    @property
    def num_workers(self) -> int:
        """Workers in the roster now."""
        return len(self._there)

    def add(self, at_s: float, event: AnyEvent) -> None:
        """Something that happened."""
        match event:
            case Joined(workers=workers):
                for worker in workers:
                    self._joined(at_s, worker)
                self.left_because = ""
            case Left(workers=gone, cause=cause):
                self._ended(at_s, gone, "left", cause)
                self.left_because = "" if self._there else cause
            case Lost(workers=gone, cause=cause):
                self._ended(at_s, gone, "lost", cause)
                self.left_because = ""
        if isinstance(event, Joined | Left | Lost):
            self._changed(at_s)

    def decided(self, at_s: float, actions: tuple[AnyAction, ...]) -> None:
        """What was decided."""
        for action in actions:
            match action:
                case Drain(worker=worker, reason=reason):
                    what = "straggler" if reason.startswith(REPLACED) else "drain"
                    self.marks.append(Mark(at_s=at_s, worker=worker, what=what, reason=reason))
                case Launch(reason=reason) if reason.startswith(REPLACE):
                    worker = reason.removeprefix(REPLACE).partition(":")[0]
                    if worker in self._there:
                        mark = Mark(at_s=at_s, worker=worker, what="straggler", reason=reason)
                        self.marks.append(mark)
                case Pause(reason=reason):
                    self._resumed(at_s)
                    self.pauses.append((at_s, None, reason))
                case Plan():
                    self._resumed(at_s)

    def _joined(self, at_s: float, worker: Worker) -> None:
        self._ended(at_s, (worker.id,), "left", "")  # impossible, unless the journal was edited
        self._there[worker.id] = len(self.presences)
        self.presences.append(Presence(worker=worker.id, kind=worker.kind, begin_s=at_s))
        self._prices[worker.id] = worker.price_per_hour

    def _ended(self, at_s: float, gone: tuple[WorkerId, ...], end: str, cause: str) -> None:
        for worker in gone:
            self._prices.pop(worker, None)
            if (i := self._there.pop(worker, None)) is not None:
                self.presences[i] = replace(self.presences[i], end_s=at_s, end=end, cause=cause)

    def _resumed(self, at_s: float) -> None:
        if self.pauses and self.pauses[-1][1] is None:
            begin_s, _, reason = self.pauses[-1]
            self.pauses[-1] = begin_s, at_s, reason

    def _changed(self, at_s: float) -> None:
        self.sizes.append((at_s, len(self._there)))
        self.costs.append((at_s, self.cost_at(at_s), sum(self._prices.values()) / 3600.0))

    def cost_at(self, at_s: float) -> float:
        """The cost up to a time that is not before the last change."""
        if not self.costs:
            return 0.0
        then_s, cost, price_per_s = self.costs[-1]
        return cost + price_per_s * max(0.0, at_s - then_s)
