"""A worker without training: it speaks the protocol over a real socket, and that is all."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from evenstep.messages import (
    Began,
    FromClient,
    Generation,
    Greeting,
    Hello,
    Ready,
    Stepped,
    ToClient,
    Welcome,
    from_client,
    proof,
    to_client,
)
from evenstep.types import StepReport

M = TypeVar("M")
WAIT_S = 20.0


def ready(**changes: Any) -> Ready:
    """A worker's word that it can begin."""
    facts: dict[str, Any] = {
        "kind": "cpu",
        "cores": 1.0,
        "batch": 64,
        "length": 1000,
        "prefetched": 0,
        "model": "a model",
        "address": "127.0.0.1",
        "port": 4000,
    }
    return Ready(**{**facts, **changes})


class Line:
    """One connection to a coordinator, spoken by hand."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), WAIT_S)
        self._held = b""
        self.greeting = self.hear(Greeting)

    def say(self, message: FromClient) -> None:
        self._socket.sendall(from_client.encode(message))

    def say_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def poll(self, wait_s: float = WAIT_S) -> ToClient | None:
        """The next message; None if none comes in time. EOFError: the other side hung up."""
        until_s = time.monotonic() + wait_s
        while b"\n" not in self._held:
            left_s = max(0.0, until_s - time.monotonic())
            if not select.select([self._socket], [], [], left_s)[0]:
                return None
            try:
                chunk = self._socket.recv(2**16)
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise EOFError
            self._held += chunk
        line, _, self._held = self._held.partition(b"\n")
        return to_client.decode(line)

    def hear(self, kind: type[M], which: Callable[[M], bool] = lambda _: True) -> M:
        """The next message of a kind; others are passed over."""
        until_s = time.monotonic() + WAIT_S
        while (left_s := until_s - time.monotonic()) > 0:
            message = self.poll(left_s)
            if isinstance(message, kind) and which(message):
                return message
        raise TimeoutError(f"no {kind.__name__} came")

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FakeWorker(Line):
    """A worker that was let in."""

    def __init__(
        self, address: str, token: str, worker: str = "", generation: int = 0, **ready_with: Any
    ) -> None:
        host, _, port = address.rpartition(":")
        super().__init__(host, int(port))
        self.say(
            Hello(
                proof=proof(token, self.greeting.nonce),
                worker=worker,
                generation=generation,
                host=socket.gethostname(),
                pid=os.getpid(),
            )
        )
        self.welcome = self.hear(Welcome)
        self.id = self.welcome.worker
        self.generation: Generation | None = None
        if not generation:
            self.say(ready(**ready_with))

    def enter(self, at_least: int = 1) -> Generation:
        """Wait for a generation, begin it, and say so if it is this worker's to say."""
        told = self.hear(Generation, lambda g: g.number >= at_least)
        self.begin(told)
        return told

    def begin(self, told: Generation) -> None:
        self.generation = told
        if told.roster[:1] == (self.id,):
            self.say(Began(generation=told.number, step=0))

    def step(self, step: int, seconds: float = 0.1) -> None:
        """Report a step as its leader does."""
        told = self.generation
        assert told is not None
        reports = tuple(
            StepReport(w, share, seconds) for w, share in zip(told.roster, told.shares, strict=True)
        )
        self.say(Stepped(generation=told.number, step=step, seconds=seconds, reports=reports))
