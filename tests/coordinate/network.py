"""A run over a network that delays and breaks: connections are queues, workers trust only them.

Each direction of a connection is in order and without loss until it breaks; then what is under way
is lost, and either side learns of it when it gets there. Workers do what the real ones do
(`train/roster`): they hold a lease, meet through what others publish, agree on the furthest state
when a generation forms, and send again what a coordinator must know when they reconnect.

A collective is complete when all workers of its group have contributed; then each of them gets the
result by itself, or fails if another one is gone by then. A worker's state is its history: which
generation took each of its steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from evenstep.coordinate.events import (
    Connected,
    Disconnected,
    EndRun,
    HangUp,
    Heard,
    MarkStopping,
    OutwardEffect,
    Send,
    Terms,
)
from evenstep.errors import InvalidInputError
from evenstep.messages import (
    Alive,
    Began,
    Done,
    FromClient,
    Generation,
    Goodbye,
    Hello,
    Lease,
    Leaving,
    Listen,
    Listening,
    Paused,
    Publish,
    Published,
    Reach,
    Reached,
    Ready,
    Refused,
    Stepped,
    Stuck,
    ToClient,
    Welcome,
)
from evenstep.types import StepReport, WorkerId
from tests.coordinate.driven import Driven
from tests.coordinate.fake import ready

DONE, REFUSED, LEFT, KILLED = 0, 1, 75, -9  # exit codes
FIRST_WAIT_S = 60.0  # a wait to report before the first step
GOODBYE_S = 10.0  # for the coordinator's answer when a worker is done
READY = ready()


class Broken:
    """The end of a connection, as one of its sides sees it."""

    def __init__(self, *, closed: bool) -> None:
        self.closed = closed  # by the other side; else it broke


CLOSED, RESET = Broken(closed=True), Broken(closed=False)


@dataclass(eq=False)
class Connection:
    """What is under way between a worker and the coordinator."""

    worker: Worker
    name: WorkerId = ""  # of the worker, at the coordinator, once it is welcome
    is_open: bool = False  # the worker knows that it is welcome
    up: deque[FromClient | Broken] = field(default_factory=deque)
    down: deque[ToClient | Broken] = field(default_factory=deque)

    def reset(self) -> None:
        """It breaks: both sides will notice."""
        self.up, self.down = deque([RESET]), deque([RESET])


@dataclass(eq=False)
class Collective:
    """A sum over a group."""

    kind: str
    given: dict[WorkerId, Any] = field(default_factory=dict)
    result: Any = None  # once all have contributed


@dataclass(eq=False)
class Group:
    """The process group of a generation."""

    number: int
    roster: tuple[WorkerId, ...]
    gone: bool = False  # somebody has left it
    collectives: list[Collective] = field(default_factory=list)


State = tuple[int, int]
"""Steps taken, and a digest of the generations that took them."""

FRESH: State = (0, 0)


class Worker:
    """One process: its control threads, and a training thread that `act` lets go on."""

    def __init__(self, net: Network, name: WorkerId = "", *, launched: bool = False) -> None:
        self.net, self.id, self.launched = net, name, launched
        self.alive, self.frozen, self.said_ready = True, False, False
        self.lies = False  # it has said what is not true
        self.cut_off = False  # from the coordinator: nothing arrives, either way
        # The control threads.
        self.connection: Connection | None = None
        self.welcome: Welcome | None = None
        self.term = 0
        self.leased_s, self.asked_s = net.now_s, deque[float]()
        self.beat_s = net.now_s
        self.to_resend: dict[object, FromClient] = {}
        self.here: set[tuple[int, str]] = set()  # published, by generation and key
        self.told: dict[int, Generation] = {}
        self.newest = self.at_once = 0
        self.goodbye = self.paused = False
        # The training thread.
        self.generation = self.formed = self.moves_to = self.reported_stuck = 0
        self.begun = self.rests = self.lost = self.has_state = False
        self.state: State = FRESH
        self.group: Group | None = None
        self.count = 0  # of collectives in this group
        self.sums: Collective | None = None  # that it waits for
        self.forming = False  # it waits for the others at the rendezvous
        self.since_s = 0.0
        self.done_s: float | None = None
        self.dial()

    def __repr__(self) -> str:
        told = [self.id or "?", f"g{self.generation}", f"{self.state[0]} steps"]
        told += ["dead"] if not self.alive else ["frozen"] if self.frozen else []
        flags = ("said_ready", "forming", "lost", "rests", "goodbye", "paused")
        told += [name for name in flags if getattr(self, name)]
        told += [f"in {self.sums.kind}"] if self.sums else []
        return f"<{' '.join(told)} told {self.newest}/{self.at_once}>"

    # The control threads.

    @property
    def can_dial(self) -> bool:
        reaches = self.alive and not (self.frozen or self.cut_off) and self.net.is_up
        return reaches and self.connection is None and not self.goodbye and not self.lease_over

    @property
    def lease_over(self) -> bool:
        return self.welcome is not None and self.net.now_s > self.leased_s

    def dial(self) -> None:
        """Connect; the answer comes as a message."""
        if not self.net.is_up:
            if self.welcome is None:
                self.exit(REFUSED)
            return
        self.connection = Connection(self)
        self.net.connections.append(self.connection)
        if self.welcome is None:
            self.leased_s = self.net.now_s + self.net.terms.lease_s
        forming = self.generation > self.formed
        hello = Hello(proof="", worker=self.id, generation=self.generation, forming=forming)
        self.connection.up.append(hello)

    def say(self, message: FromClient) -> None:
        """Drops the message while there is no connection."""
        if isinstance(message, Ready | Leaving):
            self.to_resend[type(message)] = message
        if self.connection is not None and self.connection.is_open:
            self.connection.up.append(message)

    def hear(self, message: ToClient | Broken) -> None:
        match message:
            case Broken():
                self.connection = None
                if self.welcome is None:
                    self.exit(REFUSED)
            case Welcome():
                assert self.connection is not None
                self.connection.is_open = True
                if self.welcome is None:
                    self.id, self.welcome = message.worker, message
                self.term = message.term
                self.asked_s.clear()
                for about, line in self.to_resend.items():
                    if about is not Ready or self.generation == 0:
                        self.say(line)
            case Generation(number=number, planned=planned):
                self.told[number] = message
                self.newest = max(self.newest, number)
                if not planned:
                    self.at_once = max(self.at_once, number)
                self.paused = False
            case Published(generation=number, key=key):
                self.here.add((number, key))
            case Listen(probe=probe):
                host = f"10.0.0.{int(self.id.removeprefix('w')) % 250}"
                self.say(Listening(probe=probe, host=host, port=1))
            case Reach(probe=probe, doors=doors):
                unreached = tuple(w for w in doors if frozenset((self.id, w)) in self.net.cut_links)
                self.say(Reached(probe=probe, unreached=unreached))
            case Lease():
                if self.asked_s:
                    self.leased_s = self.asked_s.popleft() + self.net.terms.lease_s
            case Goodbye() | Refused():
                self.goodbye = True
                if self.welcome is None:
                    self.exit(REFUSED)
            case Paused():
                self.paused = True
            case _:
                pass

    def beat(self) -> None:
        """A heartbeat, if one is due, and word of a wait that takes too long."""
        if not self.alive or self.frozen or self.welcome is None:
            return
        if self.net.now_s >= self.beat_s:
            self.beat_s = self.net.now_s + min(1.0, self.net.terms.lease_s / 10)
            if self.connection is not None and self.connection.is_open:
                self.asked_s.append(self.net.now_s)
            idle = self.said_ready and (not self.generation or self.lost or self.rests)
            self.say(
                Alive(
                    generation=self.generation,
                    step=self.state[0],
                    waiting=idle or self.sums is not None or self.forming,
                    forming=self.generation > self.formed,
                )
            )
        if self.sums is not None or self.forming:
            bound_s = self.net.terms.silent_s if self.state[0] else FIRST_WAIT_S
            if self.net.now_s - self.since_s > bound_s:
                self._report_stuck(self.net.now_s - self.since_s)

    def _report_stuck(self, waited_s: float = 0.0) -> None:
        if self.reported_stuck < self.generation:
            self.reported_stuck = self.generation
            self.say(Stuck(generation=self.generation, step=self.state[0], waited_s=waited_s))

    # The training thread.

    def prepare(self) -> None:
        """It has started up."""
        self.said_ready = True
        self.say(READY)

    @property
    def target(self) -> int:
        """The generation that makes the one at hand void, if there is one."""
        newest = self.at_once if self.begun else self.newest
        return newest if newest > self.generation else 0

    def act(self, chance: int = 0) -> bool:
        """Go on as far as to the next wait; False: it waits. Chance decides what races would."""
        if not self.alive or self.frozen or not self.said_ready or self.welcome is None:
            return False
        if self.done_s is not None:
            late = self.net.now_s - self.done_s > GOODBYE_S
            if self.goodbye or late or self.connection is None:
                self.exit(DONE)
            return not self.alive
        if self.sums is None and not self.forming:
            return self._settle()
        if self.forming:
            return self._meet()
        return self._await(chance)

    def _leaves(self) -> bool:
        """Whether it is no part of the run any more; it ends then."""
        if self.goodbye or self.lease_over:
            if self.lease_over and self.generation:
                self._save_last(self.told.get(self.generation))
            self.exit(LEFT)
        return not self.alive

    def _settle(self) -> bool:
        """Between two steps, or in none."""
        if self._leaves():
            return True
        if self.target:
            self._move(self.target)
        elif self.lost or self.rests or not self.generation:
            return False
        elif self.moves_to > self.generation:
            if self.moves_to not in self.told:
                return False
            if set(self.roster) <= set(self.told[self.moves_to].roster):
                self._move(self.moves_to)
            else:
                self._contribute("see off")
        elif self.state[0] >= self.net.num_steps:
            self._contribute("end", self.state)
        else:
            pending = max(0, self.newest - self.generation)
            self._contribute("step", (self.state, pending))
        return True

    @property
    def roster(self) -> tuple[WorkerId, ...]:
        return self.told[self.generation].roster

    def _move(self, number: int) -> None:
        told = self.told[number]
        self._close_group()
        self.lost, self.moves_to = False, 0
        if self.id in told.spares:
            self.generation = self.formed = number
            self.rests, self.begun, self.has_state = True, False, False
            return
        if self.id not in told.roster:
            self._save_last(told)
            self.exit(LEFT)
            return
        self.generation, self.rests = number, False
        for about in [about for about in self.to_resend if isinstance(about, int)]:
            del self.to_resend[about]
        key = f"here/{told.roster.index(self.id)}"
        self.to_resend[number] = Publish(generation=number, key=key, value=b"")
        self.here.add((number, key))
        self.say(self.to_resend[number])
        self.group, self.count = self.net.group(told), 0
        self.forming, self.since_s = True, self.net.now_s

    def _meet(self) -> bool:
        """At the rendezvous of a generation."""
        assert self.group is not None
        if self.target:
            self._fail(reports=False)
        elif self._leaves():
            pass
        elif any((self.generation, f"here/{rank}") not in self.here for rank in self.ranks):
            return False
        elif self.group.gone or self.net.is_cut(self.roster):
            self._fail(reports=True)
        else:
            self.forming = False
            self._contribute("form", self.state if self.has_state else None)
        return True

    @property
    def ranks(self) -> range:
        return range(len(self.roster))

    def _contribute(self, kind: str, value: Any = None) -> None:
        assert self.group is not None
        if self.count == len(self.group.collectives):
            self.group.collectives.append(Collective(kind))
        self.sums = self.group.collectives[self.count]
        assert self.sums.kind == kind, f"{self} in {kind}, the others in {self.sums.kind}"
        self.count += 1
        self.since_s = self.net.now_s
        self.sums.given[self.id] = value
        if len(self.sums.given) == len(self.group.roster) and not self.group.gone:
            self.net.complete(self.group, self.sums)

    def _await(self, chance: int) -> bool:
        assert self.sums is not None
        assert self.group is not None
        complete = self.sums.result is not None and not self.net.is_cut(self.roster)
        fails = bool(self.target) or self.group.gone
        if complete and not (fails and chance % 2):
            self._take(self.sums)
        elif fails:
            # A handover that breaks off leaves a part of a state.
            if self.sums.kind == "form" and complete and self.sums.result != self.state:
                self.has_state = False
            self._fail(reports=not self.target)
        else:
            return self._leaves()
        return True

    def _take(self, summed: Collective) -> None:
        """The result of a collective is there."""
        self.sums = None
        leads = self.roster[0] == self.id
        if summed.kind == "form":
            self.state, self.has_state, self.begun = summed.result, True, True
            self.formed = self.generation
            if leads:
                self.say(Began(generation=self.generation, step=self.state[0]))
        elif summed.kind == "step":
            self.state, pending = summed.result
            self.moves_to = self.generation + pending if pending else 0
            if leads:
                self.say(self.net.report(self.told[self.generation], self.state[0] - 1))
        elif summed.kind == "see off":
            self._move(self.moves_to)
        else:
            self.done_s = self.net.now_s
            self.save(self.told[self.generation])
            self.say(Done(step=self.state[0]))

    def _fail(self, *, reports: bool) -> None:
        """The group failed: this worker waits for a generation that replaces it."""
        kind, self.sums, self.forming = self.sums.kind if self.sums else "", None, False
        if kind == "see off":
            self._move(self.moves_to)
            return
        if reports:
            self._report_stuck()
        self._close_group()
        self.lost = True

    def _close_group(self) -> None:
        if self.group is not None:
            self.group.gone = True
        self.group, self.sums, self.forming = None, None, False

    def save(self, told: Generation) -> None:
        """Write a checkpoint, if it is this worker that does so, and the run has not gone on."""
        is_fenced_off = (self.term, self.newest) < self.net.fence
        if told.saves == self.id and self.has_state and not is_fenced_off:
            self.net.checkpoint = max(self.net.checkpoint, self.state)

    def _save_last(self, told: Generation | None) -> None:
        if told is not None and self.sums is None:
            self.save(told)

    # Its end.

    def exit(self, code: int, *, loses: bool = False) -> None:
        """The process ends. `loses`: so does what it said last."""
        self.alive = False
        self._close_group()
        if self.connection is not None:
            if loses:
                self.connection.up.clear()
            self.connection.up.append(CLOSED)
            self.connection.down.clear()
        self.connection = None
        if self.launched:
            self.net.exits.append((self.id, code))


class Network(Driven):
    """The coordinator, connections and workers of one run."""

    def __init__(self, folder: Path, terms: Terms, num_steps: int) -> None:
        self.num_steps = num_steps
        self.workers: list[Worker] = []
        self.connections: list[Connection] = []
        self.served: dict[WorkerId, Connection] = {}  # by name, as the coordinator has them
        self.starting: list[WorkerId] = []  # processes that have not connected
        self.stopped: list[WorkerId] = []  # processes to be terminated
        self.exits: deque[tuple[WorkerId, int]] = deque()  # that the launcher has not seen
        self.launched: list[WorkerId] = []
        self.is_up = True
        self.groups: dict[int, Group] = {}
        self.cut_links: set[frozenset[WorkerId]] = set()
        self.checkpoint: State = FRESH
        self.fence = (0, 0)
        self.announced: dict[int, tuple[WorkerId, ...]] = {}
        self.stepping = 0  # the newest generation that has taken a step
        self.num_taken = 0  # steps, also those that nobody has any more
        super().__init__(folder, terms)

    # What the coordinator does.

    def perform(self, effect: OutwardEffect) -> None:
        match effect:
            case Send(workers=workers, message=message):
                if isinstance(message, Generation):
                    self._announce(message)
                for name in workers:
                    if (connection := self.served.get(name)) is not None:
                        connection.down.append(message)
            case HangUp(worker=name):
                if (connection := self.served.pop(name, None)) is not None:
                    connection.down.append(CLOSED)
            case MarkStopping(stopping=stopping):
                self.stopping = stopping
            case EndRun():
                pass

    def _announce(self, told: Generation) -> None:
        known = self.announced.setdefault(told.number, told.roster)
        assert known == told.roster, f"generation {told.number} of {known} and of {told.roster}"
        assert told.number == max(self.announced), f"{told.number} after {max(self.announced)}"
        assert len(told.shares) == len(told.roster) == len(set(told.roster))
        assert sum(told.shares) == (READY.batch if told.roster else 0)
        self.fence = (self.terms.term, told.number)

    def start(self, kind: str, workers: Sequence[WorkerId]) -> None:
        self.starting.extend(workers)
        self.launched.extend(workers)

    def stop(self, workers: Sequence[WorkerId]) -> None:
        self.stopped.extend(workers)

    # What arrives.

    @property
    def going_up(self) -> list[Connection]:
        """Connections that the coordinator can read from. It learns by itself that one broke."""
        if not self.is_up:
            return []
        return [c for c in self.connections if c.up and (not c.worker.cut_off or c.up[0] is RESET)]

    @property
    def going_down(self) -> list[Connection]:
        """Connections that workers can read from."""
        return [
            c
            for c in self.connections
            if c.down and c.worker.connection is c and not c.worker.frozen
            if not c.worker.cut_off or c.down[0] is RESET
        ]

    def arrive_up(self, connection: Connection) -> None:
        """The coordinator reads what comes next."""
        message, name = connection.up.popleft(), connection.name
        match message:
            case Broken():
                if self.served.get(name) is connection:
                    del self.served[name]
                    self.handle(Disconnected(worker=name, broken=message is RESET))
            case Hello():
                event = Connected(
                    worker=message.worker, generation=message.generation, forming=message.forming
                )
                answer = self.handle_hello(connection, event)
                if isinstance(answer, Refused):
                    connection.down.extend((answer, CLOSED))
            case _:
                try:
                    self.handle(Heard(worker=name, message=message))
                except InvalidInputError:  # a server logs it
                    assert connection.worker.lies, f"{name} says nothing untrue"

    def handle_hello(self, connection: Connection, event: Connected) -> Refused | None:
        answers: list[Any] = []

        def reply(answer: Any) -> None:
            answers.append(answer)
            if isinstance(answer, Welcome):
                connection.name = answer.worker
                assert answer.worker not in self.served, "one connection for each name"
                self.served[answer.worker] = connection
                connection.down.append(answer)

        self._coordinator.handle(event, reply)
        return answers[0] if isinstance(answers[0], Refused) else None

    def arrive_down(self, connection: Connection) -> None:
        """A worker reads what comes next."""
        connection.worker.hear(connection.down.popleft())

    # Workers together.

    def group(self, told: Generation) -> Group:
        group = self.groups.setdefault(told.number, Group(told.number, told.roster))
        assert group.roster == told.roster, "one number, one roster"
        return group

    def is_cut(self, roster: tuple[WorkerId, ...]) -> bool:
        """Whether two of these workers cannot connect."""
        return bool(self.cut_links) and any(
            frozenset(pair) in self.cut_links for pair in combinations(roster, 2)
        )

    def complete(self, group: Group, summed: Collective) -> None:
        """All have contributed."""
        values = list(summed.given.values())
        if summed.kind == "form":
            steps = max((state[0] for state in values if state is not None), default=0)
            furthest = {state for state in values if state is not None and state[0] == steps}
            assert len(furthest) <= 1, f"workers of {group} differ at step {steps}: {summed.given}"
            summed.result = furthest.pop() if furthest else self.checkpoint
        elif summed.kind == "step":
            states = {state for state, _ in values}
            assert len(states) == 1, f"workers of {group} differ: {summed.given}"
            assert group.number >= self.stepping, (
                f"generation {group.number} takes a step after {self.stepping} has"
            )
            ((steps, history),) = states
            self.stepping = group.number
            self.num_taken += 1
            pending = summed.given[group.roster[0]][1]
            summed.result = ((steps + 1, hash((history, group.number))), pending)
        else:
            summed.result = ()

    def report(self, told: Generation, step: int) -> Stepped:
        reports = tuple(
            StepReport(w, s, 0.1) for w, s in zip(told.roster, told.shares, strict=True)
        )
        return Stepped(generation=told.number, step=step, seconds=0.1, reports=reports)

    # What happens.

    def start_one(self, index: int = 0) -> Worker:
        """A process that was launched connects."""
        self.workers.append(Worker(self, self.starting.pop(index), launched=True))
        return self.workers[-1]

    def join(self) -> Worker:
        """A worker comes from elsewhere."""
        self.workers.append(Worker(self))
        return self.workers[-1]

    def terminate(self) -> None:
        """Processes that are to end, end."""
        stopped, self.stopped = self.stopped, []
        for name in stopped:
            if name in self.starting:
                self.starting.remove(name)
                self.exits.append((name, KILLED))
            for worker in self.workers:
                if worker.id == name and worker.launched and worker.alive:
                    worker.exit(KILLED)

    def see_exit(self) -> None:
        name, code = self.exits.popleft()
        self.exited(name, code)

    def crash(self, *, loses: bool) -> None:
        """The coordinator is killed. `loses`: so is what it said last."""
        self.is_up = False
        self.served.clear()
        for connection in self.connections:
            connection.up.clear()
            if loses:
                connection.down.clear()
            connection.down.append(RESET)
        self.workers = [w for w in self.workers if w.alive]
        self.stopped.clear()
        self.exits.clear()
        self.close()

    def leave(self) -> None:
        """The run has ended, and so does the coordinator, with the workers that it launched."""
        self.is_up = False
        self.served.clear()
        self.starting.clear()
        for connection in self.connections:
            connection.up.clear()
            connection.down.append(CLOSED)
        for worker in self.workers:
            if worker.launched and worker.alive:
                worker.exit(KILLED)
        self.workers = [w for w in self.workers if w.alive]
        self.stopped.clear()
        self.exits.clear()
        self.close()

    def recover(self, num_workers: int) -> None:
        """Another coordinator takes the run over."""
        running = {w.id for w in self.workers if w.launched and w.alive} | set(self.starting)
        next_name = 1 + max((int(w[1:]) for w in self.launched), default=-1)
        ended = tuple(sorted(set(self.launched) - running))
        self.is_up = True
        self.terms = replace(self.terms, term=self.terms.term + 1)
        self.take_over(next_name, ended)
        for worker in sorted(running):
            self.adopt(worker)
        self.start_run(num_workers)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.connections = [c for c in self.connections if c.up or c.worker.connection is c]
        for worker in self.workers:
            worker.beat()
        if self.is_up:
            self.tick()
