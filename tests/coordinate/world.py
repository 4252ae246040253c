"""Workers as the coordinator meets them, without sockets, processes or time of their own.

They follow the rules of the real ones: a generation forms when all of its roster have entered it, a
planned one is passed on by the leader in a step that all take, a lost peer makes a step void.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from evenstep.coordinate.events import (
    AnyInput,
    Connected,
    EndRun,
    HangUp,
    Heard,
    MarkStopping,
    OutwardEffect,
    Send,
    Terms,
)
from evenstep.coordinate.state import RunState
from evenstep.messages import (
    Alive,
    Answer,
    Began,
    Done,
    FromClient,
    Generation,
    Goodbye,
    Leaving,
    Listen,
    Listening,
    Paused,
    Reach,
    Reached,
    Refused,
    Stepped,
    Stuck,
    ToClient,
    Welcome,
)
from evenstep.types import StepReport, WorkerId
from tests.coordinate.driven import Driven
from tests.coordinate.fake import ready


@dataclass
class SimWorker:
    """One worker, as far as its control thread and its loop go."""

    id: WorkerId
    launched: bool = False
    connected: bool = True
    frozen: bool = False  # stopped: it neither speaks nor steps, and its connection stays
    busy: bool = False  # in the script's own code: it is heard of, and does nothing else
    saving: bool = False  # the last checkpoint
    said_ready: bool = False
    generation: int = 0
    begun: bool = False
    rests: bool = False  # out of the roster, ready to come back
    lost: bool = False  # its group is gone: it waits for a generation that holds at once
    done: bool = False
    goodbye: bool = False
    paused: bool = False
    told: dict[int, Generation] = field(default_factory=dict)
    heard: list[ToClient] = field(default_factory=list)
    newest: int = 0
    at_once: int = 0

    def hear(self, message: ToClient) -> None:
        self.heard.append(message)
        match message:
            case Generation(number=number, planned=planned):
                self.told[number] = message
                self.newest = max(self.newest, number)
                if not planned:
                    self.at_once = max(self.at_once, number)
                self.paused = False
            case Goodbye() | Refused():
                self.goodbye = True
            case Paused():
                self.paused = True
            case _:
                pass

    @property
    def target(self) -> int:
        """The generation that makes the one at hand void, if there is one."""
        number = self.at_once if self.begun else self.newest
        return number if number > self.generation else 0

    @property
    def trains(self) -> bool:
        return self.connected and not self.frozen and not self.done and not self.lost


class World(Driven):
    """What the coordinator drives, its launcher, and the workers, who hear everything at once."""

    def __init__(self, folder: Path, terms: Terms | None = None) -> None:
        self.workers: dict[WorkerId, SimWorker] = {}
        self.starting: list[WorkerId] = []
        self.stopped: list[WorkerId] = []
        self.announced: list[Generation] = []
        self.formed: set[int] = set()
        self.began: set[int] = set()
        self.step = 0
        self.apart: set[WorkerId] = set()  # who reaches the coordinator, and no other worker
        self.cut_links: set[frozenset[WorkerId]] = set()  # pairs that cannot connect
        self.holds_answers = False  # control threads are slow: `answer` lets them go on
        self.unanswered: list[tuple[SimWorker, Listen | Reach]] = []
        super().__init__(folder, terms or Terms(gather_s=5.0))

    def answer(self) -> None:
        """Control threads answer, also while their worker is busy."""
        asked, self.unanswered = self.unanswered, []
        for worker, message in asked:
            if worker.frozen:
                self.unanswered.append((worker, message))
            elif isinstance(message, Listen):
                host = f"10.0.0.{int(worker.id.removeprefix('w')) % 250}"
                self.say(worker, Listening(probe=message.probe, host=host, port=1))
            else:
                failed = tuple(w for w in message.doors if not self.connects(worker.id, w))
                self.say(worker, Reached(probe=message.probe, unreached=failed))

    def connects(self, one: WorkerId, other: WorkerId) -> bool:
        """Whether two workers can connect to each other."""
        return self.apart.isdisjoint((one, other)) and {one, other} not in self.cut_links

    def handle(self, event: AnyInput) -> Welcome | Refused | Answer | None:
        before = self.state
        content = _content(before)
        reply = super().handle(event)
        assert _content(before) == content, "membership changes no state in place"
        if not self.holds_answers:
            self.answer()
        return reply

    # What it drives.

    def perform(self, effect: OutwardEffect) -> None:
        match effect:
            case Send(workers=workers, message=message):
                for worker in workers:
                    self.send(worker, message)
            case HangUp(worker=worker):
                self.hang_up(worker)
            case MarkStopping(stopping=stopping):
                self.stopping = stopping
            case EndRun():
                pass

    def send(self, worker: WorkerId, message: ToClient) -> None:
        if isinstance(message, Generation) and self._is_news(worker, message):
            self._check(message)
            self.announced.append(message)
        if worker in self.workers and self.workers[worker].connected:
            self.workers[worker].hear(message)
            if isinstance(message, Listen | Reach):
                self.unanswered.append((self.workers[worker], message))

    def hang_up(self, worker: WorkerId) -> None:
        if worker in self.workers:
            self.workers[worker].connected = False

    # Its launcher.

    def start(self, kind: str, workers: Sequence[WorkerId]) -> None:
        self.starting.extend(workers)

    def stop(self, workers: Sequence[WorkerId]) -> None:
        self.stopped.extend(workers)

    # What workers do.

    def connect(
        self, name: str = "", *, launched: bool = False, checkpoint: str = ""
    ) -> SimWorker | None:
        answer = self.hello(name, checkpoint=checkpoint)
        if isinstance(answer, Refused):
            return None
        worker = SimWorker(answer.worker, launched)
        assert not (worker.id in self.workers and self.workers[worker.id].connected)
        self.workers[worker.id] = worker
        return worker

    def say(self, worker: SimWorker, message: FromClient) -> None:
        if worker.connected:
            self.handle(Heard(worker=worker.id, message=message))

    def ready(self, worker: SimWorker, **changes: Any) -> None:
        worker.said_ready = True
        self.say(worker, ready(**changes))

    def join(self, name: str = "", **changes: Any) -> SimWorker:
        worker = self.connect(name)
        assert worker is not None
        self.ready(worker, **changes)
        return worker

    def die(self, worker: SimWorker, *, slowly: bool = False) -> None:
        """The connection closes, and so does the process if it is the launcher's.

        Slowly: the launcher sees it dying first.
        """
        if slowly and worker.launched and worker.connected:
            worker.connected = False
            self.dying(worker.id, 9)
            self.disconnected(worker.id)
        self.cut(worker)
        if worker.launched:
            worker.launched = False
            self.exited(worker.id, -9)

    def cut(self, worker: SimWorker) -> None:
        if worker.connected:
            worker.connected = False
            self.disconnected(worker.id)

    def end(self, worker: SimWorker, code: int = 0) -> None:
        """It ends by itself."""
        self.cut(worker)
        if worker.launched:
            worker.launched = False
            self.exited(worker.id, code)

    def enter(self) -> None:
        """Workers go where they are told to; a generation forms when all of its roster are in."""
        for worker in list(self.workers.values()):
            if worker.frozen or worker.busy or not worker.connected:
                continue
            if worker.goodbye and (worker.lost or worker.done or not worker.begun):
                self.end(worker, 0 if worker.done or worker.rests else 75)
            elif not worker.done and (number := worker.target):
                self._go(worker, number)
        for number in sorted({w.generation for w in self.workers.values() if w.connected}):
            roster = self._roster(number)
            if not number or number in self.formed or self._cannot_meet(number):
                continue
            if all(self._is_in(w, number) for w in roster):
                self.formed.add(number)
                for name in roster:
                    self.workers[name].begun, self.workers[name].lost = True, False
                self.began.add(number)
                self.say(self.workers[roster[0]], Began(generation=number, step=self.step))

    def take_step(self) -> bool:
        """One step of a generation that has formed; False if there is none that can take it."""
        for number in sorted(self.formed, reverse=True):
            roster = self._roster(number)
            there = [self.workers[w] for w in roster if self._is_in(w, number)]
            if len(there) < len(roster):
                continue
            if any(w.target for w in there):
                return False  # void: all go on to the next
            if any(w.busy for w in there):
                return False
            leader = there[0]
            planned = leader.newest if leader.newest > number else 0
            shares = leader.told[number].shares
            reports = tuple(StepReport(w.id, s, 0.1) for w, s in zip(there, shares, strict=True))
            message = Stepped(generation=number, step=self.step, seconds=0.1, reports=reports)
            self.step += 1
            self.say(leader, message)
            if planned:
                for worker in there:
                    if worker.connected and not worker.target:
                        self._go(worker, planned)
            return True
        return False

    def notice(self) -> None:
        """Whoever misses a peer of its generation says so, and waits for the next."""
        for worker in self.workers.values():
            number = worker.generation
            if not worker.trains or worker.rests or not number:
                continue
            missing = [w for w in self._roster(number) if not self._is_in(w, number)]
            if missing:
                if number in self.formed and not all(self._hangs(w, number) for w in missing):
                    worker.lost = True
                self.say(worker, Stuck(generation=number, step=self.step, waited_s=0.0))

    def beat(self) -> None:
        """Heartbeats of all who can, and the coordinator's own clock."""
        self.now_s += 0.5
        for worker in self.workers.values():
            if not worker.frozen:
                number = worker.generation
                waits = worker.lost or worker.rests or self._cannot_meet(number)
                waits |= any(not self._is_in(w, number) for w in self._roster(number))
                waits |= any(self.workers[w].busy for w in self._roster(number))
                waits &= not worker.busy
                alive = Alive(
                    generation=number, step=self.step, waiting=waits, saving=worker.saving
                )
                self.say(worker, alive)
        self.tick()

    def settle(self, rounds: int = 200) -> None:
        """Let everybody do what they can until nothing changes any more."""
        calm = 0
        for _ in range(rounds):
            before = self._sign()
            for name in list(self.starting):
                self.starting.remove(name)
                if (worker := self.connect(name, launched=True)) is not None:
                    self.ready(worker)
                else:
                    self.exited(name, 1)
            self.enter()
            self.take_step()
            self.notice()
            self.beat()
            for name in self.stopped:
                worker = self.workers.get(name)
                if worker is not None and worker.launched:
                    worker.frozen = False
                    self.end(worker, -9)
            self.stopped.clear()
            calm = calm + 1 if self._sign() == before else 0
            if calm > 80:  # longer than any limit in there
                return

    def restart(self, ended: tuple[WorkerId, ...] = (), lease_s: float = 0.0) -> None:
        """The coordinator dies and another one goes on with its journal."""
        for worker in self.workers.values():
            worker.connected = False
        self.starting.clear()
        self.take_over(1000, ended, lease_s)

    def reconnect(self, worker: SimWorker) -> bool:
        number = worker.generation
        forming = number > 0 and number not in self.formed
        event = Connected(worker=worker.id, generation=number, forming=forming)

        def welcomed(answer: Welcome | Refused | Answer) -> None:
            if isinstance(answer, Welcome):
                assert answer.worker == worker.id
                worker.connected = True
                # As far as a coordinator can tell that comes after.
                if not forming:
                    self.began.add(number)

        self._coordinator.handle(event, welcomed)
        return worker.connected

    def finish(self, worker: SimWorker) -> None:
        worker.done = True
        self.say(worker, Done(step=self.step))

    def leave(self, worker: SimWorker) -> None:
        self.say(worker, Leaving(why="a spot notice"))

    def _is_news(self, worker: WorkerId, told: Generation) -> bool:
        """A newcomer is told at once what the others are told to do at a step's end."""
        others = any(self.workers[w].begun for w in told.roster)
        newcomer = others and not self.workers[worker].begun
        return told not in self.announced and not newcomer

    def _cannot_meet(self, number: int) -> bool:
        roster = self._roster(number)
        return not all(self.connects(a, b) for a, b in combinations(roster, 2))

    def _check(self, told: Generation) -> None:
        """What holds of every announcement at the moment it is made."""
        assert all(self.workers[w].connected for w in told.roster), "only the living"
        if told.planned and self.announced:
            assert self.announced[-1].number in self.began, "one planned change at a time"

    def _go(self, worker: SimWorker, number: int) -> None:
        told = worker.told[number]
        worker.generation, worker.lost, worker.rests = number, False, False
        if worker.id in told.spares:
            worker.begun, worker.rests = False, True
        elif worker.id not in told.roster:
            self.end(worker, 0 if told.planned else 75)

    def _roster(self, number: int) -> tuple[WorkerId, ...]:
        return next((g.roster for g in reversed(self.announced) if g.number == number), ())

    def _is_in(self, worker: WorkerId, number: int) -> bool:
        there = self.workers.get(worker)
        return there is not None and there.trains and there.generation == number

    def _hangs(self, worker: WorkerId, number: int) -> bool:
        """It does not answer, but its sockets are there: nobody can tell yet that it is gone."""
        there = self.workers[worker]
        return there.connected and there.frozen and there.generation == number

    def _sign(self) -> object:
        told = [
            (w.id, w.connected, w.generation, w.newest, w.at_once, w.paused, w.lost, w.goodbye)
            for w in self.workers.values()
        ]
        return told, len(self.announced), len(self.starting), self.ending


def _content(state: RunState) -> list[Any]:
    """Its fields, with copies of the collections that a draft copies; all else in it is frozen."""
    fields = asdict(state).values()
    return [value.copy() if isinstance(value, dict | set) else value for value in fields]
