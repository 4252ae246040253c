"""Inputs of membership (what happened) and its effects (what to do), as data.

Both are written to the membership record as they are, so a bug can be reported as a list of inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from evenstep.messages import Answer, FromClient, Refused, ToClient, Welcome
from evenstep.types import WorkerId

CHECKPOINT = re.compile(r"step-(\d+)\.pt\Z")
"""The name of a checkpoint: after how many steps it was written."""

MAX_WORKERS = 1_000_000


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """The run's settings from the command line."""

    run: str = ""
    term: int = 0  # chosen by this coordinator, not on the command line
    lease_s: float = 3600.0
    checkpoint_every_s: float = 60.0
    checkpoints_kept: int = 3
    sets: tuple[str, ...] = ()  # path=value, over the script's own settings
    min_workers: int = 1  # an operator may not scale below
    max_workers: int = MAX_WORKERS
    restarts: int = 3
    spares: int = 0  # drained workers that stay connected, ready to come back
    prices: tuple[tuple[str, float], ...] = ()  # per worker-hour, by kind; "" for all others
    flops: tuple[tuple[str, float], ...] = ()  # by kind, where they are known
    silence_s: float = 5.0
    patience_s: float = 30.0
    gather_s: float = 60.0  # how long the first workers wait to begin together
    start_s: float = 600.0  # start-up deadline of a launched worker
    awaits_joiners: bool = False  # without workers the run pauses, and does not end
    queues: bool = False  # an engine may keep launched workers waiting before they start

    def price_of(self, kind: str) -> float:
        """Hourly price for this kind."""
        prices = dict(self.prices)
        return prices.get(kind, prices.get("", 1.0))

    @property
    def silent_s(self) -> float:
        """Seconds without a heartbeat after which a worker is silent."""
        return max(self.silence_s, 3 * min(1.0, self.lease_s / 10))


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    ok: bool
    why: str
    told: str = ""  # the traceback or last output of the script that failed
    worker: WorkerId = ""  # on which it failed


class Input(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Something that happened outside."""


class Opened(Input, frozen=True, kw_only=True):
    """A coordinator starts: always the first input."""

    terms: Terms
    next_name: int = 0  # number of the first free worker name
    generation: int = 0  # up to it, generation numbers may have been used


class TookOver(Input, frozen=True, kw_only=True):
    """The run had a coordinator before, and the brain is restored from the journal."""

    facts: dict[str, Any]  # that all workers share
    rostered: tuple[WorkerId, ...]  # every id that was ever in a roster
    previous_roster: tuple[WorkerId, ...]  # of the generation before the newest
    stopping: bool = False  # its workers were asked to leave
    lost: tuple[WorkerId, ...] = ()  # the last roster, if it was lost
    ended: tuple[WorkerId, ...] = ()  # their processes are known to be gone
    lease_s: float = 0.0  # the longest that a worker may still hold from the coordinator before


class Adopted(Input, frozen=True, kw_only=True):
    """A launched process outlived the coordinator that launched it."""

    worker: WorkerId


class Gone(Input, frozen=True, kw_only=True):
    """The engine does not show these workers of an earlier coordinator: they have ended."""

    workers: tuple[WorkerId, ...]


class StartAsked(Input, frozen=True, kw_only=True):
    """Launch the first workers; for a resumed run, as many as it lacks."""

    num_workers: int
    explicit: bool = False  # this number counts for more than the size of a resumed run


class Connected(Input, frozen=True, kw_only=True):
    """A worker connects; it has proved that it knows the token."""

    worker: WorkerId = ""  # empty: it wants a name
    generation: int = 0  # the one that it trains in; 0 if it is new
    forming: bool = False  # that generation has not formed yet, as far as it knows
    host: str = ""
    pid: int = 0
    sees_folder: bool = False  # it can write checkpoints to the run folder
    checkpoint: str = ""  # path of the newest one, empty if there is none


class Heard(Input, frozen=True, kw_only=True):
    """A worker sent a message."""

    worker: WorkerId
    message: FromClient


class Disconnected(Input, frozen=True, kw_only=True):
    """A worker's connection closed."""

    worker: WorkerId
    broken: bool = False  # such as a timeout: the worker may train on


class Dying(Input, frozen=True, kw_only=True):
    """A signal is ending a launched process; its connection may stay open for a while."""

    worker: WorkerId
    signal: int


class Exited(Input, frozen=True, kw_only=True):
    """A launched process has ended."""

    worker: WorkerId
    code: int  # negative: the signal that ended it
    output: str = ""  # the end of its log
    why: str = ""  # in the engine's words, if it was the engine that ended it


class Begun(Input, frozen=True, kw_only=True):
    """The engine has started the processes of these workers: they wait in no queue."""

    workers: tuple[WorkerId, ...]


class Preempted(Input, frozen=True, kw_only=True):
    """The engine is about to take a worker's host away."""

    worker: WorkerId
    why: str


class NotStarted(Input, frozen=True, kw_only=True):
    """The launcher could not start these workers."""

    workers: tuple[WorkerId, ...]
    cause: str


class ScaleAsked(Input, frozen=True, kw_only=True):
    """An operator asks for this many workers."""

    num_workers: int


class WorkerDrainAsked(Input, frozen=True, kw_only=True):
    """An operator asks that a worker leave."""

    worker: WorkerId


class StopAsked(Input, frozen=True, kw_only=True):
    """End the run in order: at a step's end, with a checkpoint."""

    why: str


class KillAsked(Input, frozen=True, kw_only=True):
    """End the run at once."""

    why: str


class EvictAsked(Input, frozen=True, kw_only=True):
    """Terminate the processes of these workers."""

    workers: tuple[WorkerId, ...]


class Tick(Input, frozen=True, kw_only=True):
    """Time passes: a few times a second."""


class Crashed(Input, frozen=True, kw_only=True):
    """Handling the input before this one raised an exception."""

    why: str
    traceback: str


AnyInput = (
    Opened
    | TookOver
    | Adopted
    | Gone
    | StartAsked
    | Connected
    | Heard
    | Disconnected
    | Dying
    | Exited
    | Begun
    | Preempted
    | NotStarted
    | ScaleAsked
    | WorkerDrainAsked
    | StopAsked
    | KillAsked
    | EvictAsked
    | Tick
    | Crashed
)


class Effect(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """An order to a driver."""


class Send(Effect, frozen=True, kw_only=True):
    """Send a message to these workers. It may be lost with a connection."""

    workers: tuple[WorkerId, ...]
    message: ToClient


class Reply(Effect, frozen=True, kw_only=True):
    """Answer the worker or the operator whose input this is."""

    message: Welcome | Refused | Answer


SendReply = Callable[[Welcome | Refused | Answer], None]
"""Sends such an answer."""


class HangUp(Effect, frozen=True, kw_only=True):
    """Close a worker's connection once it has read what was sent."""

    worker: WorkerId


class StartProcesses(Effect, frozen=True, kw_only=True):
    """Launch these workers."""

    workers: tuple[WorkerId, ...]
    kind: str = ""
    reason: str


class StopProcess(Effect, frozen=True, kw_only=True):
    """Terminate the process of a launched worker."""

    worker: WorkerId


class MarkStopping(Effect, frozen=True, kw_only=True, omit_defaults=True):
    """Note for a coordinator that takes over: the workers leave, or have left by now."""

    stopping: bool = True


class EndRun(Effect, frozen=True, kw_only=True):
    """The run is over; the journal ends."""

    ending: Ending


class Log(Effect, frozen=True, kw_only=True):
    """One line for people."""

    text: str
    level: str = "info"


OutwardEffect = Send | HangUp | MarkStopping | EndRun
"""Performed with sockets and files."""

AnyEffect = OutwardEffect | Reply | StartProcesses | StopProcess | Log
