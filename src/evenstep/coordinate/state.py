"""The state of membership: one frozen value that only `membership` replaces."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from evenstep.coordinate.status import Throughput
from evenstep.coordinate.terms import Ending, Store, Terms
from evenstep.decide.cluster import Cluster
from evenstep.messages import Generation
from evenstep.types import StepReport, Worker, WorkerId


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMember:
    """A connected worker."""

    id: WorkerId
    host: str = ""
    pid: int = 0
    state: WorkerState = WorkerState.STARTING
    worker: Worker | None = None  # once it is ready
    begun: bool = False  # it has been in a generation that began
    leaves_because: str = ""
    may_stay: bool = False  # as a spare, when it leaves
    num_failed_joins: int = 0  # generations that never formed with it as a joiner

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
    waiting_since_s: float | None = None
    stuck_s: float | None = None  # when it said that it is stuck
    has_stepped: bool = False

    def forgiven(self, now_s: float, lag_s: float) -> Contact:
        """Discount a time in which the coordinator itself did not listen."""
        return msgspec.structs.replace(
            self,
            heard_s=now_s,
            stuck_s=None if self.stuck_s is None else self.stuck_s + lag_s,
            waiting_since_s=None if self.waiting_since_s is None else self.waiting_since_s + lag_s,
        )

    def freed(self) -> Contact:
        """A step or a generation is over, and with it the wait."""
        if not self.waiting and self.waiting_since_s is None and self.stuck_s is None:
            return self
        return msgspec.structs.replace(self, waiting=False, waiting_since_s=None, stuck_s=None)


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a process, not judged yet."""

    code: int  # negative: the signal that ended it
    output: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """A worker's process, as far as the run has to know; also of workers launched elsewhere."""

    running: bool = False  # launched here, and not ended
    started_s: float | None = None
    exit: Exit | None = None
    in_order: bool = False  # nothing more is expected of it
    evicted: bool = False
    lost: bool = False  # from the roster, whatever its process does then
    relieved: bool = False  # a spare has replaced it
    refused: str = ""  # why


# The phase: which generation the workers are in.


@dataclass(frozen=True, slots=True)
class Starting:
    """No generation has been announced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Returning:
    """After a takeover: workers of the newest roster are expected back until `until_s`."""

    away: frozenset[WorkerId]
    missing: Mapping[WorkerId, str] = field(default_factory=dict)  # given up, and why
    behind: frozenset[WorkerId] = frozenset()  # back, but in an older generation
    previous_roster: tuple[WorkerId, ...] = ()
    until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Training:
    """A generation trains."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Changing:
    """A generation is announced and has not begun."""

    running: Generation | None  # None: the change holds at once, and nobody trains
    coming: Generation
    leaver_gone_s: float | None = None  # a leaver disconnected before `coming` began


@dataclass(frozen=True, slots=True)
class Suspended:
    """Too few workers: they wait, state in hand."""

    reason: str


Phase = Starting | Returning | Training | Changing | Suspended


# How the run closes; None while it goes on.


@dataclass(frozen=True, slots=True)
class Finishing:
    """A worker has trained to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """Somebody asked for the end of the run."""

    why: str
    since_s: float  # when all were last asked to leave
    announced: bool = False  # a generation with an empty roster is announced
    finishing: bool = False  # a worker has trained to the end meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The run is over. A script that fails afterwards may still change the ending."""

    ending: Ending
    stopped_because: str = ""


Closing = Finishing | Stopping | Ended


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the coordinator's own clock and the last steps say."""

    clock_read_s: float | None = None  # when an input last looked at the clock
    recent_steps_s: tuple[float, ...] = ()
    num_meetings: int = 0  # since the last step, of workers that all waited for each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """For people only: no effect depends on it."""

    step: int = -1  # the last one taken
    reports: Mapping[WorkerId, StepReport] = field(default_factory=dict)
    throughput: Throughput = field(default_factory=Throughput)


class RunView:
    """What a state and a draft of the next one can be asked alike."""

    phase: Phase
    closing: Closing | None
    processes: Mapping[WorkerId, ProcessInfo]

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


class RunState(RunView, msgspec.Struct, frozen=True, kw_only=True):
    """Everything the coordinator knows about who takes part in a run."""

    terms: Terms = Terms()
    next_name: int = 0
    phase: Phase = Starting()
    closing: Closing | None = None
    members: Mapping[WorkerId, RunMember] = {}
    stores: Mapping[WorkerId, Store] = {}
    processes: Mapping[WorkerId, ProcessInfo] = {}
    restarts_left: int = 0
    has_launched: bool = False
    rostered: Set[WorkerId] = frozenset()  # ids that were ever in a roster
    finished: Set[WorkerId] = frozenset()  # trained to the end; their scripts may still run
    facts: Mapping[str, Any] = {}  # that all workers share
    first_ready_s: float | None = None
    last_loss: str = "none came"
    cluster: Cluster | None = None  # as the brain last left it
    contacts: Mapping[WorkerId, Contact] = {}
    timing: Timing = Timing()
    progress: Progress = Progress()

    @property
    def evicted(self) -> set[WorkerId]:
        """Workers whose processes were to be terminated."""
        return {worker for worker, info in self.processes.items() if info.evicted}

    @property
    def phase_name(self) -> str:
        """As operators read it."""
        match self.closing, self.phase:
            case Ended(), _:
                return "ended"
            case Stopping(), _:
                return "stopping"
            case Finishing(), _:
                return "finishing"
            case None, Returning():
                return "waiting for workers to come back"
            case None, Suspended():
                return "paused"
            case None, Starting():
                return "starting"
        return "training" if self.running else "regrouping"

    @property
    def reason(self) -> str:
        """Why the run is paused or stopping; empty if it is neither."""
        match self.phase, self.closing:
            case Suspended(reason), _:
                return reason
            case _, Stopping(why=reason) | Ended(stopped_because=reason):
                return reason
        return ""

    def name_of(self, worker: WorkerId) -> str:
        """A worker's state, as operators read it."""
        if worker in self.away:
            return "away"
        member = self.members.get(worker)
        if member is None:
            starting = worker in self.running_processes and worker not in self.rostered
            return "starting" if starting else "gone"
        return "stuck" if self.contacts[worker].stuck_s is not None else member.state.value


MINOR = ("cluster", "contacts", "timing", "progress")
"""Fields that change with every heartbeat or step. A record restores them from elsewhere."""
