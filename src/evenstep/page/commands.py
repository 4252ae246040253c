"""What the page may ask of the coordinator: as `evenstep scale` and `drain` do, and stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from evenstep.errors import InvalidInputError
from evenstep.identity import WORKER_NAME
from evenstep.types import counted

MAX_BYTES = 1024

AskCoordinator = Callable[..., dict[str, Any]]


class Command(msgspec.Struct, frozen=True, tag_field="what", forbid_unknown_fields=True):
    """One command, as JSON with the field `what`."""


class Scale(Command, frozen=True, tag="scale"):
    """Change the number of workers."""

    num_workers: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class DrainWorker(Command, frozen=True, tag="drain"):
    """Let a worker leave at the end of a step."""

    worker: Annotated[str, msgspec.Meta(pattern=rf"^{WORKER_NAME}\Z")]


class StopRun(Command, frozen=True, tag="stop"):
    """Stop the run after the step at hand, with a checkpoint."""


_commands: msgspec.json.Decoder[Scale | DrainWorker | StopRun] = msgspec.json.Decoder(
    Scale | DrainWorker | StopRun
)


def read_command(body: bytes) -> Scale | DrainWorker | StopRun:
    """The command in a request's body; InvalidInputError if it is none."""
    try:
        return _commands.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise InvalidInputError("command", str(e)) from None


def forward(command: Scale | DrainWorker | StopRun, ask: AskCoordinator) -> str:
    """Ask the coordinator; returns what it answered, in words. Its refusals are EvenstepErrors."""
    match command:
        case Scale(num_workers=num_workers):
            told = ask("scale", num_workers=num_workers)
            return f"asked for {counted(told['num_workers'])}"
        case DrainWorker(worker=worker):
            ask("drain", worker=worker)
            return f"{worker} leaves at the end of a step"
        case StopRun():
            ask("stop")
            return "the run stops after this step, with a checkpoint"
