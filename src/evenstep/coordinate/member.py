"""One worker as the coordinator sees it, the terms of a run, and how a run ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import msgspec

from evenstep.config import Settings
from evenstep.journal import Journal
from evenstep.messages import ToClient
from evenstep.types import Worker, WorkerId

MOST_WORKERS = 1_000_000


class State(Enum):
    """How far a connected worker is."""

    STARTING = "starting"
    READY = "ready"  # waits to be taken in
    IN = "training"  # of the newest roster
    ASKED = "leaving"  # still of the roster; its leave has not been announced
    LEFT = "left"  # out of the announced roster; goes when that generation has begun
    GONE = "gone"  # was told goodbye; its connection will end
    SPARE = "spare"  # out of the roster and ready to come back, without start-up
    DONE = "done"


class Store(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a generation meets that a worker leads, and whether it can write checkpoints."""

    address: str
    port: int
    sees_folder: bool = False  # the run's


@dataclass(slots=True, kw_only=True)
class Member:
    """A worker that was welcomed, and what was last heard of it."""

    id: WorkerId
    host: str = ""
    pid: int = 0
    state: State = State.STARTING
    worker: Worker | None = None  # once it is ready
    begun: bool = False  # it has been part of a generation that began
    leaves_because: str = ""
    may_stay: bool = False  # as a spare, when it leaves
    num_unmet: int = 0  # generations that did not come about with it as a newcomer
    generation: int = 0  # that it last said it is in
    heard_s: float = 0.0
    alive_s: float = 0.0  # its last heartbeat
    waiting: bool = False  # on its peers, as of that heartbeat
    apart: bool = False  # between two steps, as of that heartbeat: in the script's own time
    waiting_since_s: float | None = None
    stuck_s: float | None = None  # since when it says so
    has_stepped: bool = False
    share: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0

    @property
    def trains(self) -> bool:
        """Whether it is of the newest roster, and not through."""
        return self.state in (State.IN, State.ASKED)

    def forgive(self, now_s: float, lag_s: float) -> None:
        """We did not listen for so long: that time counts for nothing."""
        self.heard_s = now_s
        if self.stuck_s is not None:
            self.stuck_s += lag_s
        if self.waiting_since_s is not None:
            self.waiting_since_s += lag_s

    def freed(self) -> None:
        """A step or a generation is over: it no longer waits for it."""
        self.waiting, self.waiting_since_s, self.stuck_s = False, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a run is told on its command line."""

    run: str = ""
    lease_s: float = 3600.0
    checkpoint_every_s: float = 60.0
    checkpoints_kept: int = 3
    sets: tuple[str, ...] = ()  # path=value, over the script's own settings
    least: int = 1  # workers that an operator may scale to
    most: int = MOST_WORKERS
    restarts: int = 3
    spares: int = 0  # drained workers that stay ready
    prices: tuple[tuple[str, float], ...] = ()  # of a worker-hour, by kind; "" for all others
    silence_s: float = 5.0
    patience_s: float = 30.0
    gather_s: float = 60.0  # at most, for the first workers to be ready together
    start_s: float = 600.0  # for a worker that was started, to be ready

    def price_of(self, kind: str) -> float:
        """Of an hour of a worker of a kind."""
        prices = dict(self.prices)
        return prices.get(kind, prices.get("", 1.0))

    @property
    def silent_s(self) -> float:
        """Without a heartbeat for so long, a worker is silent."""
        return max(self.silence_s, 3 * min(1.0, self.lease_s / 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended."""

    ok: bool
    why: str
    told: str = ""  # by the script that failed: its traceback
    worker: WorkerId = ""


class Outside(Protocol):
    """What the coordinator asks of the world around it. Nothing here calls back at once."""

    def send(self, worker: WorkerId, message: ToClient) -> None:
        """Hand a message over. It may be lost with the connection."""
        ...

    def hang_up(self, worker: WorkerId) -> None:
        """End a connection once what was sent is out."""
        ...

    def journal(self, settings: Settings, about: dict[str, Any]) -> Journal | None:
        """The record of a new run."""
        ...

    def checkpoint(self) -> str:
        """The newest checkpoint's path, empty if there is none."""
        ...

    def keep(self, stores: Mapping[WorkerId, Store]) -> None:
        """Keep this for a coordinator that comes after."""
        ...
