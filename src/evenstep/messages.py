"""What workers, operators and the coordinator say to each other: one line of JSON each.

The coordinator speaks first, with a nonce. Whoever connects answers with a proof that it knows the
run's token, and only then is anything else read from it. With it goes a nonce of its own: the
coordinator's answer proves that it knows the token, too. The token itself is never sent.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import msgspec

from evenstep.types import StepReport, Steps, WorkerId
from evenstep.wire import Codec

PROTOCOL = 3
GREETING_BYTES = 2**16
"""The longest line from someone who has not proved anything yet."""

CLIENT, COORDINATOR = "client", "coordinator"
"""Whose proof it is: what one side can be made to say is of no use in the other's place."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One line."""


# First words.


class Greeting(Message, frozen=True, kw_only=True):
    """The coordinator's first line."""

    protocol: int = PROTOCOL
    nonce: str


class Hello(Message, frozen=True, kw_only=True):
    """The answer of a worker. One that was in the run before says so: `worker`, `generation`."""

    protocol: int = PROTOCOL
    proof: str
    nonce: str = ""  # for the coordinator's proof
    worker: WorkerId = ""  # empty: give me a name
    generation: int = 0  # that it trains in; 0: it is new
    host: str = ""
    pid: int = 0


class Ask(Message, frozen=True, kw_only=True):
    """The answer of an operator: one question, one `Answer`, and the connection ends."""

    protocol: int = PROTOCOL
    proof: str
    nonce: str = ""  # for the coordinator's proof
    what: str  # status, scale, drain, stop
    num_workers: int = 0  # for scale
    worker: WorkerId = ""  # for drain


class Answer(Message, frozen=True, kw_only=True):
    """To an operator. `problem` is empty if it was done."""

    problem: str = ""
    told: dict[str, Any] = {}
    proof: str = ""  # the coordinator's


class Refused(Message, frozen=True, kw_only=True):
    """The last line to someone who cannot take part.

    Without a proof if it is the first and goes to someone who has proved nothing: a worker that is
    in the run does not end because of it.
    """

    why: str
    proof: str = ""  # the coordinator's


class Welcome(Message, frozen=True, kw_only=True):
    """A worker's name for life, and the terms."""

    worker: WorkerId
    lease_s: float
    run: str = ""  # the run's folder, on the coordinator's host
    checkpoint_every_s: float = 0.0  # 0: none while training
    checkpoints_kept: int = 3
    resume: str = ""  # the checkpoint to begin from
    underway: bool = False  # others train, and will hand over their state
    proof: str = ""  # the coordinator's


# From workers.


ALIKE = (
    *("batch", "per_worker", "limit", "length", "seed", "shuffle", "drop_last"),
    *("prefetched", "things", "disabled_scalers", "model"),
)
"""What all workers of a run must have alike, of what they say when they are ready."""

WAY_OUT = {
    "disabled_scalers": "; a GradScaler must be enabled on all workers or on none, or gradients of "
    "different scales are summed",
}


def differ(name: str, one: Any, where: str, other: Any, elsewhere: str) -> str:
    """What to tell of a fact that is not alike, with the way out if it needs one."""
    told, than = ("none" if value == "" else value for value in (one, other))
    return f"is {told} {where}, {than} {elsewhere}{WAY_OUT.get(name, '')}"


# Defaults are left out: a coordinator of an older version refuses fields that it does not know.
class Ready(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Started up, model and data built: ready to take a share."""

    kind: str
    cores: float
    cap: int | None = None
    batch: int  # global; 0: it grows, `per_worker` for each up to `limit`
    per_worker: int = 0
    limit: int = 0
    length: int  # of the dataset
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    prefetched: int
    things: str = ""  # names of what has a state, besides the model
    disabled_scalers: str = ""  # names of the GradScalers among them that do not scale
    settings: dict[str, Any] = {}  # the script's own, of the config tree
    model: str  # a digest of names, shapes and dtypes
    address: str  # of the store that this worker hosts, for generations it leads
    port: int
    sees_folder: bool = False  # the run's: it can write checkpoints


class Began(Message, frozen=True, kw_only=True):
    """The leader: a generation has begun, at this step."""

    generation: int
    step: int


class Stepped(Message, frozen=True, kw_only=True):
    """The leader: a step was taken, after others in which nothing was new."""

    generation: int
    step: int
    seconds: float
    reports: tuple[StepReport, ...]
    grad_squared_norm: float = 0.0  # of the whole step's gradient; 0: not measured
    quiet: Steps = Steps()  # the others
    position: int = 0  # samples of the job that the run has walked through


class Stuck(Message, frozen=True, kw_only=True):
    """This worker waits for its peers, longer than a step can take."""

    generation: int
    step: int
    waited_s: float


class Alive(Message, frozen=True, kw_only=True):
    """A worker's heartbeat, off the hot path; answered with `Lease`."""

    generation: int
    step: int
    waiting: bool  # on its peers
    apart: bool = False  # from its sums on, until the next batch: the script's own time


class Leaving(Message, frozen=True, kw_only=True):
    """A worker asks to be let go at a step's end: a spot notice, a signal."""

    why: str


class Done(Message, frozen=True, kw_only=True):
    """A worker has trained to the end."""

    step: int


class Failed(Message, frozen=True, kw_only=True):
    """The user's script raised on this worker."""

    told: str  # the traceback


# To workers.


class Generation(Message, frozen=True, kw_only=True):
    """A new generation. `planned`: at the end of the step in which the leader passes it on, with
    the old one training on until then. Otherwise at once: the step at hand is void.

    A worker that is not in the roster leaves, or waits if it is one of the spares. An empty roster
    ends the run.
    """

    number: int
    roster: tuple[WorkerId, ...]  # by rank
    shares: tuple[int, ...]  # by rank
    lr_factor: float = 1.0
    lr_warmup_steps: int = 0  # in which the learning rate gets there
    measures: bool = False  # squared norms of gradients are wanted
    planned: bool
    spares: tuple[WorkerId, ...] = ()
    saves: WorkerId = ""  # who writes checkpoints; the last one, where the roster is empty
    address: str = ""  # of the leader's store
    port: int = 0
    reason: str


class NewPlan(Message, frozen=True, kw_only=True):
    """To the leader: other shares."""

    generation: int
    shares: tuple[int, ...]  # by rank
    lr_factor: float = 1.0
    reason: str


class Paused(Message, frozen=True, kw_only=True):
    """Too few workers: wait, state in hand."""

    reason: str


class Lease(Message, frozen=True, kw_only=True):
    """The coordinator has heard a heartbeat: the lease runs anew."""


class Goodbye(Message, frozen=True, kw_only=True):
    """Nothing more is expected of this worker: it may end."""

    why: str = ""


FromClient = Hello | Ask | Ready | Began | Stepped | Stuck | Alive | Leaving | Done | Failed
ToClient = Greeting | Welcome | Refused | Answer | Generation | NewPlan | Paused | Lease | Goodbye

from_client: Codec[FromClient] = Codec(FromClient)
from_stranger: Codec[Hello | Ask] = Codec(Hello | Ask, max_bytes=GREETING_BYTES)
to_client: Codec[ToClient] = Codec(ToClient)


def proof(token: str, nonce: str, whose: str = CLIENT) -> str:
    """Shows that one knows the token, without telling it."""
    return hmac.new(token.encode(), f"{whose} {nonce}".encode(), hashlib.sha256).hexdigest()


def proves(told: str, token: str, nonce: str, whose: str = CLIENT) -> bool:
    """Whether a proof is right, in time that does not depend on how wrong it is."""
    return hmac.compare_digest(told.encode(), proof(token, nonce, whose).encode())
