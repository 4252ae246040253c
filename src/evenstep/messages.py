"""The messages between workers, operators and the coordinator: one line of JSON each.

Handshake: the coordinator sends a nonce. The client answers with a proof that it knows the run's
token, and with its own nonce; the coordinator reads nothing else before that. The coordinator's
answer proves that it knows the token, too. The token itself is never sent.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from evenstep.identity import WORKER_NAME
from evenstep.types import StepReport, Steps, WorkerId
from evenstep.wire import Codec

PROTOCOL = 5
GREETING_BYTES = 2**16
"""The longest line accepted from a client that has not authenticated."""

CLIENT, COORDINATOR, LISTENER = "client", "coordinator", "listener"
"""Who made a proof: no side's proof can be replayed as another's."""


MOST = 2**53
"""The largest number from a client: up to it, JSON readers agree."""

Count = Annotated[int, Meta(ge=0, le=MOST)]
Amount = Annotated[float, Meta(ge=0)]  # JSON has no infinity and no NaN
Name = Annotated[str, Meta(pattern=rf"\A({WORKER_NAME})?\Z")]
"""A worker's name, or empty."""

Text = Annotated[str, Meta(max_length=2**16, pattern=r"\A[^\x00-\x1f\x7f-\x9f]*\Z")]
"""Text of one line, without control characters: it is shown on terminals."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


# Handshake.


class Greeting(Message, frozen=True, kw_only=True):
    """The coordinator's first message."""

    protocol: int = PROTOCOL
    nonce: str


class Hello(Message, frozen=True, kw_only=True):
    """A worker's first message. A worker that reconnects gives `worker` and `generation`."""

    protocol: int = PROTOCOL
    proof: str
    nonce: str = ""  # for the coordinator's proof
    worker: Name = ""  # empty: the coordinator chooses one
    generation: Count = 0  # that it trains in; 0: it is new
    forming: bool = False  # that generation has not formed yet, as far as this worker knows
    host: Text = ""
    pid: Count = 0
    sees_folder: bool = False  # it can write checkpoints to the run folder


class Ask(Message, frozen=True, kw_only=True):
    """An operator's only message; the coordinator sends one `Answer` and hangs up."""

    protocol: int = PROTOCOL
    proof: str
    nonce: str = ""  # for the coordinator's proof
    what: Text  # status, scale, drain, stop
    num_workers: Count = 0  # for scale
    worker: Name = ""  # for drain


class Answer(Message, frozen=True, kw_only=True):
    """To an operator. `problem` is empty on success."""

    problem: str = ""
    told: dict[str, Any] = {}
    proof: str = ""  # the coordinator's


class Refused(Message, frozen=True, kw_only=True):
    """The coordinator turns a client away and hangs up.

    Without a proof if the client has not authenticated: a worker of the run ignores such a message.
    """

    why: str
    trained: bool = False  # the run has been trained to the end
    proof: str = ""  # the coordinator's


class Welcome(Message, frozen=True, kw_only=True):
    """A worker is admitted: its id, and the terms of the run."""

    worker: WorkerId
    lease_s: float
    silence_s: float = 5.0  # a shorter wait for other workers is not reported
    run: str = ""  # the run folder, on the coordinator's host
    term: int = 0  # the coordinator's: grows with every takeover
    checkpoint_every_s: float = 0.0  # 0: none during training
    checkpoints_kept: int = 3
    resume: str = ""  # the checkpoint to start from
    underway: bool = False  # others already train and will send their state
    proof: str = ""  # the coordinator's


# From workers.


ALIKE = (
    *("batch", "per_worker", "limit", "length", "seed", "shuffle", "drop_last", "order"),
    *("prefetched", "things", "disabled_scalers", "processes", "model"),
)
"""Fields of `Ready` that must be equal on all workers of a run."""

WAY_OUT = {
    "disabled_scalers": "; enable GradScaler on all workers or on none, otherwise gradients of "
    "different scales are summed",
    "processes": "; all hosts of a run shard the model over as many: fsdp.join(processes=...)",
}


def differ(name: str, one: Any, where: str, other: Any, elsewhere: str) -> str:
    """The message for a field that differs between workers, with the way out if there is one."""
    mine, theirs = ("none" if value == "" else value for value in (one, other))
    return f"is {mine} {where}, {theirs} {elsewhere}{WAY_OUT.get(name, '')}"


# Omits defaults, as `Stepped`: a coordinator of an older version rejects fields that it does not
# know.
class Ready(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A worker has built its model and data and is ready for a share."""

    kind: Text
    cores: float  # membership checks these two, and says what is wrong
    cap: int | None = None
    batch: Count  # global; 0: `per_worker` for each worker, up to `limit`
    per_worker: Count = 0
    limit: Count = 0
    length: Count  # of an epoch; 0: of a stream
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    order: Text = ""  # of the samples, in words, if not that of a permutation or of the dataset
    prefetched: Count
    things: Text = ""  # names of the stateful objects besides the model
    disabled_scalers: Text = ""  # names of the disabled GradScalers among them
    settings: dict[str, Any] = {}  # from the script
    processes: Count = 1  # of the worker, which share one model
    model: Text  # a digest of names, shapes and dtypes
    sees_folder: bool = False  # it can write checkpoints to the run folder


class Publish(Message, frozen=True, kw_only=True):
    """For the other workers of a generation: where to reach this one, in the words of c10d."""

    generation: Count
    key: Text
    value: Annotated[bytes, Meta(max_length=2**20)]


class Began(Message, frozen=True, kw_only=True):
    """From the leader: a generation has started, at this step."""

    generation: Count
    step: Count


class Stepped(Message, frozen=True, kw_only=True, omit_defaults=True):
    """From the leader: a step was committed, after `quiet` steps that were not reported."""

    generation: Count
    step: Count
    seconds: Amount
    reports: tuple[StepReport, ...]
    grad_squared_norm: Amount = 0.0  # of the whole step's gradient; 0: not measured
    quiet: Steps = Steps()  # since the last report
    earlier: Steps = Steps()  # of earlier generations; their samples are in `quiet`, too
    position: Count = 0  # samples of the job consumed so far
    idle_s: Amount = 0.0  # without training since the last report, because the roster changed
    nonfinite: tuple[Name, ...] = ()  # workers whose own gradients were not finite since then


class Stuck(Message, frozen=True, kw_only=True):
    """A worker has waited for other workers for longer than a step can take."""

    generation: Count
    step: Count
    waited_s: Amount


class Alive(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's heartbeat, off the hot path; answered with `Lease`."""

    generation: Count
    step: Count
    waiting: bool  # for other workers
    apart: bool = False  # between the all-reduce and the next batch: in the script's own code
    saving: bool = False  # it writes its last checkpoint
    forming: bool = False  # the generation has not formed yet
    unsaved: Text = ""  # why its newest checkpoint is not written


class Listening(Message, frozen=True, kw_only=True):
    """Answer to `Listen`. Without a host, other workers cannot test their connections to it."""

    probe: Text
    host: Text = ""
    port: Annotated[int, Meta(ge=0, lt=2**16)] = 0


class Reached(Message, frozen=True, kw_only=True):
    """Answer to `Reach`: the workers that this one cannot connect to."""

    probe: Text
    unreached: tuple[Name, ...] = ()


class Leaving(Message, frozen=True, kw_only=True):
    """A worker asks to leave at the end of a step, after a spot notice or a signal."""

    why: Text


class Done(Message, frozen=True, kw_only=True):
    """A worker has trained to the end."""

    step: Count


class Failed(Message, frozen=True, kw_only=True):
    """The user's script raised on this worker."""

    told: Annotated[str, Meta(max_length=2**20)]  # the traceback


# To workers.


class Generation(Message, frozen=True, kw_only=True):
    """A new generation. `planned`: workers finish the step in which the leader announces it.
    Otherwise they switch at once, and the current step is void.

    A worker that is not in the roster leaves, or waits if it is a spare. An empty roster ends the
    run.
    """

    number: int
    roster: tuple[WorkerId, ...]  # by rank
    shares: tuple[int, ...]  # by rank
    lr_factor: float = 1.0
    lr_warmup_steps: int = 0  # steps until the learning rate reaches the factor
    measures: bool = False  # workers measure squared gradient norms
    planned: bool
    spares: tuple[WorkerId, ...] = ()
    saves: WorkerId = ""  # writes checkpoints; with an empty roster, the final one
    reason: str


class Published(Message, frozen=True, kw_only=True):
    """What another worker of a generation has published."""

    generation: Count
    key: Text
    value: Annotated[bytes, Meta(max_length=2**20)]


class Listen(Message, frozen=True, kw_only=True):
    """Listen for so many seconds where other workers connect to this one, and say at which port."""

    probe: str
    seconds: float


class Reach(Message, frozen=True, kw_only=True):
    """Try to connect to these workers, each within so many seconds."""

    probe: str
    doors: dict[WorkerId, tuple[str, int]]  # address and port
    within_s: float


class NewPlan(Message, frozen=True, kw_only=True):
    """To the leader: new shares."""

    generation: int
    shares: tuple[int, ...]  # by rank
    lr_factor: float = 1.0
    reason: str


class Paused(Message, frozen=True, kw_only=True):
    """Too few workers: keep the state and wait."""

    reason: str


class Lease(Message, frozen=True, kw_only=True):
    """The coordinator has received a heartbeat and renews the lease."""


class Goodbye(Message, frozen=True, kw_only=True):
    """This worker may exit."""

    why: str = ""
    trained: bool = False  # the run has been trained to the end


FromClient = (
    Hello
    | Ask
    | Ready
    | Publish
    | Began
    | Stepped
    | Stuck
    | Alive
    | Listening
    | Reached
    | Leaving
    | Done
    | Failed
)
ToClient = (
    Greeting
    | Welcome
    | Refused
    | Answer
    | Generation
    | Published
    | Listen
    | Reach
    | NewPlan
    | Paused
    | Lease
    | Goodbye
)

from_client: Codec[FromClient] = Codec(FromClient)
from_stranger: Codec[Hello | Ask] = Codec(Hello | Ask, max_bytes=GREETING_BYTES)
to_client: Codec[ToClient] = Codec(ToClient)


def proof(token: str, nonce: str, whose: str = CLIENT) -> str:
    """A proof of knowing the token that does not reveal it."""
    return hmac.new(token.encode(), f"{whose} {nonce}".encode(), hashlib.sha256).hexdigest()


def proves(given: str, token: str, nonce: str, whose: str = CLIENT) -> bool:
    """Whether a proof is valid, compared in constant time."""
    return hmac.compare_digest(given.encode(), proof(token, nonce, whose).encode())
