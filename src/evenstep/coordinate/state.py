"""The state of membership: a value that only `membership` replaces, and never changes in place."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec
from msgspec.structs import replace

from evenstep.coordinate.events import Ending, Terms
from evenstep.decide.cluster import Cluster
from evenstep.messages import Generation, Published
from evenstep.types import StepReport, Steps, Worker, WorkerId

RECENT_S = 10.0  # of the run's clock; the newest steps count even if they took longer
OVERDUE = 10.0  # no report for this many times the last report's duration: stalled


class WorkerState(Enum):
    """How far a connected worker is."""

    STARTING = "starting"
    READY = "ready"  # waits for a generation to join
    TRAINING = "training"  # in the newest roster
    LEAVING = "leaving"  # still in the roster; its leave has not been announced
    LEFT = "left"  # out of the announced roster; goes when that generation begins
    DISMISSED = "gone"  # was sent a Goodbye; its connection will close
    SPARE = "spare"  # out of the roster, ready to come back without start-up
    DONE = "done"  # trained to the end


class RunMember(msgspec.Struct, frozen=True, kw_only=True):
    """A connected worker."""

    id: WorkerId
    host: str = ""
    pid: int = 0
    state: WorkerState = WorkerState.STARTING
    worker: Worker | None = None  # once it is ready
    begun: bool = False  # it has been in a generation that began
    sees_folder: bool = False  # it can write checkpoints to the run folder
    leaves_because: str = ""
    may_stay: bool = False  # as a spare, when it leaves
    reachable: bool = False  # its connections with the others were tested successfully
    num_failed_joins: int = 0  # generations that never formed with it as a joiner
    num_failed_tests: int = 0  # tests in a row in which it could not connect with another worker

    @property
    def trains(self) -> bool:
        """Whether it is in the newest roster and has not finished."""
        return self.state in (WorkerState.TRAINING, WorkerState.LEAVING)


class Contact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When a worker was last heard from, and whether it waits for the others."""

    heard_s: float = 0.0
    heartbeat_s: float = 0.0
    generation: int = 0  # that it last said it is in
    waiting: bool = False  # for other workers, as of its last heartbeat
    apart: bool = False  # between two steps, as of its last heartbeat
    saving: bool = False  # it writes the last checkpoint, as of its last heartbeat
    unsaved: str = ""  # why its newest checkpoint is not written, as of its last heartbeat
    waiting_since_s: float | None = None
    stuck_s: float | None = None  # when it said that it is stuck
    has_stepped: bool = False

    def forgiven(self, now_s: float, lag_s: float) -> Contact:
        """Discount time in which the coordinator itself was not listening."""
        return replace(
            self,
            heard_s=now_s,
            stuck_s=None if self.stuck_s is None else self.stuck_s + lag_s,
            waiting_since_s=None if self.waiting_since_s is None else self.waiting_since_s + lag_s,
        )

    def freed(self) -> Contact:
        """A step or a generation is over, and with it the wait."""
        if not self.waiting and self.waiting_since_s is None and self.stuck_s is None:
            return self
        return replace(self, waiting=False, waiting_since_s=None, stuck_s=None)


class Exit(msgspec.Struct, frozen=True):
    """The end of a process, not judged yet."""

    code: int  # negative: the signal that ended it
    output: str
    at_s: float
    why: str = ""  # in the engine's words


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's process, as far as the run has to know; also of workers launched elsewhere."""

    running: bool = False  # launched here, and not ended
    started_s: float | None = None
    queued: bool = False  # the engine has not started it yet
    exit: Exit | None = None
    in_order: bool = False  # nothing more is expected of it
    evicted: bool = False
    lost: bool = False  # from the roster, whatever its process does afterwards
    relieved: bool = False  # a spare has replaced it
    refused: str = ""  # why it has no part in the run, or has none any more


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """A worker was lost, and it is not known that it has ended."""

    roster: tuple[WorkerId, ...]  # it trains on only while all of these do
    until_s: float  # its lease is over then


class LinkProbe(msgspec.Struct, frozen=True, kw_only=True):
    """A test of which workers can connect to each other. Training goes on meanwhile."""

    id: str
    workers: frozenset[WorkerId]
    joiners: frozenset[WorkerId]  # only their links are tested; empty: those of all
    until_s: float  # deadline of the round under way
    doors: Mapping[WorkerId, tuple[str, int]] = {}  # round 1: where each listens; port 0: nowhere
    dials: Mapping[WorkerId, frozenset[WorkerId]] | None = None  # round 2: each one's targets
    unreached: Mapping[WorkerId, frozenset[WorkerId]] = {}  # and those that it failed to reach


# The phase: which generation the workers are in.


class Starting(msgspec.Struct, frozen=True):
    """No generation has been announced."""


class Returning(msgspec.Struct, frozen=True, kw_only=True):
    """After a takeover: workers of the newest roster are expected back until `until_s`."""

    away: frozenset[WorkerId]
    missing: Mapping[WorkerId, str] = {}  # given up, and why
    behind: frozenset[WorkerId] = frozenset()  # back, but in an older generation
    previous_roster: tuple[WorkerId, ...] = ()
    until_s: float = 0.0


class Training(msgspec.Struct, frozen=True):
    """A generation trains."""

    generation: Generation


class Changing(msgspec.Struct, frozen=True, kw_only=True):
    """A generation is announced and has not begun."""

    running: Generation | None  # None: the change holds at once, and nobody trains
    coming: Generation
    leaver_gone_s: float | None = None  # a leaver disconnected before `coming` began


class Suspended(msgspec.Struct, frozen=True):
    """Too few workers: they wait, state in hand."""

    reason: str


Phase = Starting | Returning | Training | Changing | Suspended


# How the run closes; None while it goes on.


class Finishing(msgspec.Struct, frozen=True):
    """A worker has trained to the end."""


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """The run is being stopped before its end."""

    why: str
    since_s: float  # when all were last asked to leave
    announced: bool = False  # a generation with an empty roster is announced
    finishing: bool = False  # a worker has trained to the end meanwhile
    pauses: bool = False  # once all have left, the run waits for workers to join


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The run is over. A script that fails afterwards may still change the ending."""

    ending: Ending
    stopped_because: str = ""

    @property
    def has_trained_to_end(self) -> bool:
        return self.ending.ok and not self.stopped_because


Closing = Finishing | Stopping | Ended


class LastStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far the run is known to have come."""

    num_taken: int = 0
    at_s: float = 0.0  # when the coordinator learned of it
    generation: int = 0  # that reported a step last, and which one
    step: int = -1
    lease_s: float = 0.0  # the longest granted by an earlier coordinator


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A worker says that it has trained to the end."""

    step: int
    doubted_s: float | None = None  # when its generation first reported an earlier step


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Times that the coordinator keeps for itself."""

    clock_read_s: float | None = None  # when an input last looked at the clock
    recent_steps_s: tuple[float, ...] = ()
    num_meetings: int = 0  # since the last step, of workers that all waited for each other
    linked_s: float | None = None  # when workers that all wait were last found to be connected
    last_step: LastStep = LastStep()


class Throughput(msgspec.Struct, frozen=True):
    """Samples per second of a generation's last steps, as its leader reports them."""

    generation: int = 0
    reported: tuple[tuple[float, Steps], ...] = ()  # when, and the steps since the one before

    def add(self, now_s: float, generation: int, steps: Steps) -> Throughput:
        """The throughput with some more steps; those of an earlier generation are dropped."""
        before = self.reported if generation == self.generation else ()
        recent = tuple(entry for entry in before if now_s - entry[0] <= RECENT_S)
        return Throughput(generation, (*recent, (now_s, steps)))

    def samples_per_s(self, now_s: float, generation: int) -> float:
        """0 if this generation has reported no step, or none for much longer than a step takes."""
        if generation != self.generation or not self.reported:
            return 0.0
        last_s, newest = self.reported[-1]
        if now_s - last_s > max(RECENT_S, OVERDUE * newest.seconds):
            return 0.0
        recent = [steps for at_s, steps in self.reported if now_s - at_s <= RECENT_S] or [newest]
        return round(sum(s.samples for s in recent) / sum(s.seconds for s in recent), 1)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """For people only: no effect depends on it."""

    step: int = -1  # the last one taken
    reports: Mapping[WorkerId, StepReport] = {}
    throughput: Throughput = Throughput()


class RunState(msgspec.Struct, kw_only=True):
    """Everything the coordinator knows about who takes part in a run."""

    terms: Terms = Terms()
    next_name: int = 0
    used_generation: int = 0  # numbers up to it may be taken, even if they are not in the journal
    phase: Phase = Starting()
    closing: Closing | None = None
    members: dict[WorkerId, RunMember] = {}
    published: dict[tuple[WorkerId, str], Published] = {}  # in the newest generation; by whom, key
    probe: LinkProbe | None = None  # under way
    num_probes: int = 0
    processes: dict[WorkerId, ProcessInfo] = {}
    doubts: dict[WorkerId, Doubt] = {}  # lost workers that may train on
    restarts_left: int = 0
    has_launched: bool = False
    rostered: set[WorkerId] = set()  # ids that were ever in a roster
    proven: set[WorkerId] = set()  # ids that have taken a step
    finished: dict[WorkerId, Completion] = {}  # trained to the end; their scripts may still run
    nonfinite: dict[WorkerId, int] = {}  # whose gradients are not finite, since which step
    facts: dict[str, Any] = {}  # that all workers share
    first_ready_s: float | None = None
    last_loss: str = "none came"
    cluster: Cluster | None = None  # as the brain last left it
    contacts: dict[WorkerId, Contact] = {}
    timing: Timing = Timing()
    progress: Progress = Progress()

    @property
    def running(self) -> Generation | None:
        """The generation that trains."""
        if isinstance(self.phase, Training):
            return self.phase.generation
        return self.phase.running if isinstance(self.phase, Changing) else None

    @property
    def away(self) -> frozenset[WorkerId]:
        """After a takeover: workers that are not back yet."""
        return self.phase.away if isinstance(self.phase, Returning) else frozenset()

    @property
    def ending(self) -> Ending | None:
        """How the run ended; None while it goes on."""
        return self.closing.ending if isinstance(self.closing, Ended) else None

    @property
    def running_processes(self) -> set[WorkerId]:
        """Launched workers whose processes have not ended."""
        return {worker for worker, info in self.processes.items() if info.running}

    @property
    def evicted(self) -> set[WorkerId]:
        """Workers whose processes were to be terminated."""
        return {worker for worker, info in self.processes.items() if info.evicted}


MINOR = ("cluster", "contacts", "timing", "progress")
"""Fields that change with every heartbeat or step. A record restores them from elsewhere."""
