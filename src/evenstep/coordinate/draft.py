"""The next state while an input is handled: a mutable copy, with the effects so far."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol, Self

from msgspec.structs import replace

from evenstep.config import Settings
from evenstep.coordinate import state as st
from evenstep.coordinate.events import MAX_WORKERS, AnyEffect, HangUp, Log, Send, StopProcess
from evenstep.coordinate.state import RunState, WorkerState
from evenstep.decide.cluster import Cluster
from evenstep.decide.learning_rate import max_workers as batch_max_workers
from evenstep.messages import Generation, ToClient
from evenstep.types import AnyAction, AnyEvent, Joined, Left, Lost, Resumed, WorkerId

LEASE_MARGIN_S = 1.0  # a lease may have been renewed just before its worker was lost


class Decides(Protocol):
    """The brain as membership uses it: it answers within the call and keeps its own journal."""

    @property
    def cluster(self) -> Cluster: ...
    def begin(self, settings: Settings, facts: dict[str, Any]) -> None: ...
    def decide(self, now_s: float, event: AnyEvent) -> tuple[AnyAction, ...]: ...


class Draft(RunState, kw_only=True):
    """A copy of the state, the time, the brain, and the effects so far."""

    now_s: float
    brain: Decides
    effects: list[AnyEffect]

    @classmethod
    def of(cls, state: RunState, now_s: float, brain: Decides) -> Self:
        """A copy of the state; values inside its collections are shared, since they are frozen."""
        values = {name: getattr(state, name) for name in RunState.__struct_fields__}
        copies = {name: v.copy() for name, v in values.items() if isinstance(v, dict | set)}
        return cls(now_s=now_s, brain=brain, effects=[], **{**values, **copies})

    def state(self) -> RunState:
        """The next state."""
        return RunState(**{name: getattr(self, name) for name in RunState.__struct_fields__})

    def put(self, member: st.RunMember) -> None:
        """Update what is known of a worker."""
        self.members[member.id] = member

    def remove(self, worker: WorkerId) -> st.RunMember | None:
        """Forget a connected worker."""
        self.contacts.pop(worker, None)
        return self.members.pop(worker, None)

    def free(self, worker: WorkerId) -> None:
        """A worker no longer waits for the others."""
        self.contacts[worker] = self.contacts[worker].freed()

    def process(self, worker: WorkerId) -> st.ProcessInfo:
        """What is known of a worker's process."""
        return self.processes.get(worker, st.ProcessInfo())

    def expect_no_more(self, worker: WorkerId) -> None:
        """A worker's part in the run is over, in good order."""
        self.processes[worker] = replace(self.process(worker), in_order=True)

    def evict_process(self, worker: WorkerId) -> None:
        """Terminate a worker's process, if it was launched here."""
        info = self.process(worker)
        self.processes[worker] = replace(info, evicted=True)
        if info.running:
            self.effects.append(StopProcess(worker=worker))

    def new_name(self) -> WorkerId:
        """A free name. No name is used twice."""
        taken = self.rostered | self.members.keys() | self.running_processes
        while (name := f"w{self.next_name}") in taken:
            self.next_name += 1
        self.next_name += 1
        return name

    def decide(self, event: AnyEvent) -> tuple[AnyAction, ...]:
        """Put an event to the brain."""
        if isinstance(event, Joined | Left | Lost):
            self.skip_used_generations()
        actions = self.brain.decide(self.now_s, event)
        self.cluster = self.brain.cluster
        return actions

    def skip_used_generations(self) -> None:
        """Let the next generation have a number that was never used, whatever was recorded."""
        if self.used_generation > self.number:
            self.brain.decide(self.now_s, Resumed(generation=self.used_generation))
            self.cluster = self.brain.cluster

    def send(self, message: ToClient, *workers: WorkerId) -> None:
        if workers:
            self.effects.append(Send(workers=workers, message=message))

    def hang_up(self, worker: WorkerId) -> None:
        self.effects.append(HangUp(worker=worker))

    def log(self, text: str, level: str = "info") -> None:
        self.effects.append(Log(text=text, level=level))

    # The phase, and how the run closes.

    @property
    def coming(self) -> Generation | None:
        """The generation that is announced and has not begun."""
        return self.phase.coming if isinstance(self.phase, st.Changing) else None

    @property
    def stopping(self) -> str:
        """Why the run is being stopped; empty if it is not."""
        return self.closing.why if isinstance(self.closing, st.Stopping) else ""

    @property
    def parting(self) -> bool:
        """Whether the end of the run is announced."""
        return isinstance(self.closing, st.Stopping) and self.closing.announced

    @property
    def pausing(self) -> bool:
        """Whether the last workers leave, and the run then waits for others to join."""
        return isinstance(self.closing, st.Stopping) and self.closing.pauses

    @property
    def finishing(self) -> bool:
        """Whether a worker has trained to the end and is still in the roster."""
        closing = self.closing
        return isinstance(closing, st.Finishing) or (
            isinstance(closing, st.Stopping) and closing.finishing
        )

    @property
    def has_trained_to_end(self) -> bool:
        """Whether the run is over, and there is nothing left to train."""
        return isinstance(self.closing, st.Ended) and self.closing.has_trained_to_end

    def set_finishing(self, finishing: bool) -> None:
        if isinstance(self.closing, st.Stopping):
            self.closing = replace(self.closing, finishing=finishing)
        else:
            self.closing = st.Finishing() if finishing else None

    # Questions.

    @property
    def number(self) -> int:
        """Of the newest generation."""
        return self.cluster.generation if self.cluster else 0

    @property
    def roster(self) -> tuple[WorkerId, ...]:
        """The newest one."""
        return self.cluster.roster if self.cluster else ()

    @property
    def capacity(self) -> int:
        """The most workers that the run may have: its batch must give each a share."""
        most = batch_max_workers(self.cluster.settings.batch) if self.cluster else MAX_WORKERS
        return min(self.terms.max_workers, most)

    def is_in(self, worker: WorkerId, state: WorkerState) -> bool:
        member = self.members.get(worker)
        return member is not None and member.state is state

    def in_states(self, *states: WorkerState) -> list[st.RunMember]:
        return [m for m in self.members.values() if m.state in states]

    def training(self) -> list[st.RunMember]:
        """Workers of the newest roster that have not finished."""
        return [m for m in self.members.values() if m.trains]

    def trains(self, worker: WorkerId) -> bool:
        member = self.members.get(worker)
        return member is not None and member.trains

    def is_running(self, worker: WorkerId) -> bool:
        """Whether a worker is in the generation that trains."""
        return self.running is not None and worker in self.running.roster

    def saver(self, roster: Sequence[WorkerId]) -> WorkerId:
        """The worker that writes checkpoints: first in rank, connected, and sees the run folder."""
        connected = self.in_states(
            WorkerState.READY, WorkerState.SPARE, WorkerState.TRAINING, WorkerState.LEAVING
        )
        able = {m.id for m in connected if m.sees_folder}
        return next((w for w in roster if w in able), "")

    def joiners(self) -> list[st.RunMember]:
        """Workers of the newest roster that have not begun, while others have, or may train on."""
        training = self.training()
        others = any(m.begun for m in training) or self.others_may_train({m.id for m in training})
        return [m for m in training if not m.begun] if others else []

    def others_may_train(self, roster: AbstractSet[WorkerId]) -> bool:
        """Whether lost workers may train on while these form a generation, and none leaves them."""
        return any(roster.isdisjoint(doubt.roster) for doubt in self.doubts.values())

    def settle_doubts(self, ended: WorkerId) -> None:
        """A worker has ended or moved on: nobody trains in a generation with it any more."""
        self.doubts = {w: doubt for w, doubt in self.doubts.items() if ended not in doubt.roster}

    def expects_workers(self) -> bool:
        """Whether any worker, connected or launched, may still take part in the run."""
        if any(m.state is not WorkerState.DISMISSED for m in self.members.values()):
            return True
        infos = self.processes.values()
        return any((info.running and not info.in_order) or info.exit for info in infos)

    def on_the_way(self) -> set[WorkerId]:
        """Launched workers that have not joined yet."""
        ready = {m.id for m in self.in_states(WorkerState.READY)}
        return ready | {
            worker
            for worker, info in self.processes.items()
            if info.running and not (info.in_order or info.evicted or info.refused)
            if worker not in self.rostered
        }

    def num_unlaunched(self) -> int:
        """Workers that the brain has ordered and that were not launched yet."""
        ordered = self.cluster.launching if self.cluster else 0
        return ordered - len(self.on_the_way())

    def gathers(self) -> bool:
        """Whether the first workers wait for others, so that they begin together."""
        if self.first_ready_s is None or self.roster:
            return False
        starting = any(not self.is_in(w, WorkerState.READY) for w in self.on_the_way())
        return starting and self.now_s - self.first_ready_s < self.terms.gather_s
