"""Where a run stands: its members, its generations, and small questions about them."""

from __future__ import annotations

from collections.abc import Sequence

from evenstep.coordinate.brain import Brain
from evenstep.coordinate.crew import Crew
from evenstep.coordinate.member import (
    MOST_WORKERS,
    Ending,
    Member,
    Outside,
    State,
    Store,
    Terms,
)
from evenstep.decide.learning_rate import max_workers
from evenstep.messages import Generation
from evenstep.ports import Launcher
from evenstep.types import WorkerId


class Standing:
    """What is known of a run. Nothing here changes it."""

    def __init__(self, terms: Terms, outside: Outside, launcher: Launcher | None) -> None:
        self.terms = terms
        self.crew = Crew(launcher, terms.restarts)
        self.ending: Ending | None = None
        self._outside = outside
        self._brain: Brain | None = None
        self._members: dict[WorkerId, Member] = {}
        self._stores: dict[WorkerId, Store] = {}
        self._used: set[WorkerId] = set()  # ids that were ever in a roster
        self._running: Generation | None = None  # the one that trains
        self._coming: Generation | None = None  # announced, not begun
        self._paused = ""  # why
        self._stopping = ""  # why
        self._stopping_s = 0.0  # when all were last asked to leave
        self._parting = False  # the end has been announced
        self._finishing = False  # someone has trained to the end
        self.trained: set[WorkerId] = set()  # finished training; their scripts may still be running
        self._ready_s: float | None = None  # when the first worker was
        self._leaver_gone_s: float | None = None  # before the generation without it began
        # After a restart: who is not back yet, and who will not come.
        self._away: set[WorkerId] = set()
        self._missing: dict[WorkerId, str] = {}
        self._last_loss = "none came"
        self._step = -1  # the last one taken

    @property
    def _number(self) -> int:
        return self._brain.cluster.generation if self._brain else 0

    @property
    def _roster(self) -> tuple[WorkerId, ...]:
        return self._brain.cluster.roster if self._brain else ()

    @property
    def _most(self) -> int:
        """Workers that the run may have: no more than its batch can be shared among."""
        room = max_workers(self._brain.cluster.settings.batch) if self._brain else MOST_WORKERS
        return min(self.terms.most, room)

    def _is(self, worker: WorkerId, state: State) -> bool:
        member = self._members.get(worker)
        return member is not None and member.state is state

    def _all_in(self, *states: State) -> list[Member]:
        return [m for m in self._members.values() if m.state in states]

    def _trains(self, worker: WorkerId) -> bool:
        member = self._members.get(worker)
        return member is not None and member.trains

    def _in_running(self, worker: WorkerId) -> bool:
        return self._running is not None and worker in self._running.roster

    def _saver(self, roster: Sequence[WorkerId]) -> WorkerId:
        """Who of a roster writes checkpoints: the first who is there and sees the run's folder."""
        there = self._all_in(State.READY, State.SPARE, State.IN, State.ASKED)
        able = {m.id for m in there if m.id in self._stores and self._stores[m.id].sees_folder}
        return next((w for w in roster if w in able), "")

    def _newcomers(self) -> list[Member]:
        """Who is of the newest roster and has not begun, while others have."""
        training = [m for m in self._members.values() if m.trains]
        return [m for m in training if not m.begun] if any(m.begun for m in training) else []

    def _anyone(self) -> bool:
        """Whether anybody is there of whom something can be expected."""
        connected = any(m.state is not State.GONE for m in self._members.values())
        return connected or bool(self.crew.running - self.crew.in_order or self.crew.exits)

    def _on_the_way(self) -> set[WorkerId]:
        """Launched workers that are to join, and have not."""
        crew = self.crew
        back = {m.id for m in self._all_in(State.READY)}
        return back | (
            crew.running - (crew.in_order | crew.evicted | crew.refused.keys() | self._used)
        )

    def _is_overfull(self) -> bool:
        """Whether the batch cannot give the workers of the roster their minimum."""
        if self._brain is None:
            return False
        cluster = self._brain.cluster
        least = cluster.settings.batch.min_share
        staying = [w for w in cluster.ranks if w.id not in cluster.draining]
        return sum(min(least, w.cap or least) for w in staying) > cluster.batch

    def _num_missing(self) -> int:
        """Workers that the brain has ordered and nobody has launched."""
        ordered = self._brain.cluster.launching if self._brain else 0
        return ordered - len(self._on_the_way())

    def _gathers(self, now_s: float) -> bool:
        """Whether the first workers are still waited for, so that they begin together."""
        if self._ready_s is None or self._roster:
            return False
        starting = any(not self._is(w, State.READY) for w in self._on_the_way())
        return starting and now_s - self._ready_s < self.terms.gather_s

    def _spares(self) -> tuple[WorkerId, ...]:
        """Who leaves with the generation that is made now, and stays ready."""
        room = self.terms.spares - len(self._all_in(State.SPARE))
        leaving = [m.id for m in self._all_in(State.LEFT) if m.may_stay]
        return tuple(leaving[: max(0, room)])
