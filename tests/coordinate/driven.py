"""A coordinator with its brain, journal and record, driven without sockets, processes or clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from evenstep.coordinate.brain import Brain
from evenstep.coordinate.coordinator import Coordinator
from evenstep.coordinate.events import (
    Adopted,
    AnyInput,
    Connected,
    Disconnected,
    Dying,
    Ending,
    Exited,
    KillAsked,
    Opened,
    OutwardEffect,
    ScaleAsked,
    StartAsked,
    StopAsked,
    Terms,
    Tick,
    WorkerDrainAsked,
)
from evenstep.coordinate.operators import status
from evenstep.coordinate.record import MembershipRecorder
from evenstep.coordinate.state import RunState
from evenstep.journal import Journal
from evenstep.messages import Answer, Refused, Welcome
from evenstep.types import WorkerId


class Driven:
    """One run's coordinators, one after the other. Subclasses perform the effects."""

    def __init__(self, folder: Path, terms: Terms) -> None:
        self.folder, self.terms, self.now_s = folder, terms, 0.0
        self.stopping = False  # a note in the run folder
        self._brain = self._new_brain()
        self._open()

    def _new_brain(self) -> Brain:
        path = self.folder / "journal.jsonl"
        return Brain(lambda settings, about: Journal.create(path, settings, about), lambda: 0.0)

    def _open(self, next_name: int = 0) -> None:
        record = MembershipRecorder(self.folder / "membership.jsonl")
        self._coordinator = Coordinator(self._brain, self.perform, lambda: self.now_s, record)
        self._coordinator.launcher = self
        self.handle(Opened(terms=self.terms, next_name=next_name))

    def take_over(
        self, next_name: int, ended: tuple[WorkerId, ...] = (), lease_s: float = 0.0
    ) -> None:
        """The coordinator is gone, and another one goes on with its journal.

        `lease_s`: the longest that the one before has granted.
        """
        self.close()
        self._brain = self._new_brain()
        took_over = None
        if (journal := self.folder / "journal.jsonl").exists():
            clock_s, took_over, _ = self._brain.restore(journal)
            self.now_s = max(self.now_s, clock_s)
        self._open(next_name)
        if took_over is not None:
            stopping = self.stopping
            self.handle(replace(took_over, stopping=stopping, ended=ended, lease_s=lease_s))
        self.stopping = False

    def perform(self, effect: OutwardEffect) -> None:
        """Perform an effect of the coordinator."""
        raise NotImplementedError

    def start(self, kind: str, workers: Sequence[WorkerId]) -> None:
        """Launch workers."""
        raise NotImplementedError

    def stop(self, workers: Sequence[WorkerId]) -> None:
        """Terminate launched workers."""
        raise NotImplementedError

    def handle(self, event: AnyInput) -> Welcome | Refused | Answer | None:
        """Tell the coordinator of something; its reply, if there is one."""
        replies: list[Welcome | Refused | Answer] = []
        self._coordinator.handle(event, replies.append)
        return replies[0] if replies else None

    @property
    def state(self) -> RunState:
        return self._coordinator.state

    @property
    def ending(self) -> Ending | None:
        return self.state.ending

    def status(self) -> dict[str, Any]:
        return status(self.state, self.now_s)

    def start_run(self, num_workers: int, explicit: bool = False) -> None:
        self.handle(StartAsked(num_workers=num_workers, explicit=explicit))

    def ask(self, what: str, *, num_workers: int = 0, worker: WorkerId = "") -> Answer:
        scale, drain = ScaleAsked(num_workers=num_workers), WorkerDrainAsked(worker=worker)
        answer = self.handle(scale if what == "scale" else drain)
        assert isinstance(answer, Answer)
        return answer

    def stop_run(self, why: str) -> None:
        self.handle(StopAsked(why=why))

    def kill_run(self, why: str) -> None:
        self.handle(KillAsked(why=why))

    def tick(self) -> None:
        self.handle(Tick())

    def exited(self, worker: WorkerId, code: int, output: str = "") -> None:
        self.handle(Exited(worker=worker, code=code, output=output))

    def dying(self, worker: WorkerId, signal: int) -> None:
        self.handle(Dying(worker=worker, signal=signal))

    def disconnected(self, worker: WorkerId, *, broken: bool = False) -> None:
        self.handle(Disconnected(worker=worker, broken=broken))

    def adopt(self, worker: WorkerId) -> None:
        self.handle(Adopted(worker=worker))

    def hello(
        self, worker: WorkerId = "", generation: int = 0, checkpoint: str = ""
    ) -> Welcome | Refused:
        """A worker's first words, of which nothing comes after."""
        event = Connected(worker=worker, generation=generation, checkpoint=checkpoint)
        answer = self.handle(event)
        assert isinstance(answer, Welcome | Refused)
        return answer

    def flush(self) -> None:
        self._coordinator.flush()

    def close(self) -> None:
        self._coordinator.close()
