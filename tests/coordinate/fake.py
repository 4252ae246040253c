"""A worker without training: it speaks the protocol over a real socket, and that is all."""

from __future__ import annotations

import os
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from typing import Any, Self, TypeVar

from evenstep.coordinate.client import connect
from evenstep.coordinate.tls import TlsSocket
from evenstep.messages import (
    COORDINATOR,
    Alive,
    Began,
    FromClient,
    Generation,
    Greeting,
    Hello,
    Lease,
    Listen,
    Listening,
    Ready,
    Stepped,
    ToClient,
    Welcome,
    from_client,
    proof,
    proves,
    to_client,
)
from evenstep.types import StepReport

M = TypeVar("M")
WAIT_S = 600.0


def ready(**changes: Any) -> Ready:
    """A worker's word that it can begin."""
    facts: dict[str, Any] = {
        "kind": "cpu",
        "cores": 1.0,
        "batch": 64,
        "length": 1000,
        "prefetched": 0,
        "model": "a model",
        "sees_folder": True,
        "settings": {},
    }
    facts |= changes
    batch = {"size": facts["batch"], "min_share": 1, **facts["settings"].get("batch", {})}
    return Ready(**{**facts, "settings": {**facts["settings"], "batch": batch}})


def eventually(what: Callable[[], bool]) -> None:
    """Wait until it is so."""
    until_s = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < until_s
        time.sleep(0.01)


class Line:
    """One connection to a coordinator, spoken by hand."""

    def __init__(self, host: str, port: int, fingerprint: str = "") -> None:
        self._socket = connect(host, port, WAIT_S, fingerprint)
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
            if isinstance(self._socket, TlsSocket):
                pass  # it may hold what was received, and waits by itself for WAIT_S
            elif not select.select([self._socket], [], [], left_s)[0]:
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

    def waiting(self, wait_s: float = 0.05) -> list[ToClient]:
        """All that has come, and comes until there is a pause."""
        return list(iter(lambda: self.poll(wait_s), None))

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a thread that reads keeps it open
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FakeWorker(Line):
    """A worker that was let in."""

    def __init__(
        self,
        where: str,
        token: str,
        worker: str = "",
        generation: int = 0,
        fingerprint: str = "",
        **ready_with: Any,
    ) -> None:
        self._where, self._token, self._fingerprint = where, token, fingerprint
        self.deaf = threading.Event()  # it reads nothing more
        self.generation: Generation | None = None
        self._dial(worker, generation)
        if not generation:
            self.say(ready(**ready_with))

    def _dial(self, worker: str, generation: int) -> None:
        self._heard: queue.Queue[ToClient | None] | None = None
        host, _, port = self._where.rpartition(":")
        super().__init__(host, int(port), self._fingerprint)
        nonce = secrets.token_hex(16)
        self.say(
            Hello(
                proof=proof(self._token, self.greeting.nonce),
                nonce=nonce,
                worker=worker,
                generation=generation,
                host=socket.gethostname(),
                pid=os.getpid(),
            )
        )
        self.welcome = self.hear(Welcome)
        self._heard = queue.Queue()
        threading.Thread(target=copy(self)._read, daemon=True).start()
        assert proves(self.welcome.proof, self._token, nonce, COORDINATOR)
        self.id = self.welcome.worker

    def _read(self) -> None:
        """In a thread: it answers what a control thread does, whatever the test is at."""
        heard = self._heard
        assert heard is not None
        with suppress(EOFError, OSError, ValueError):
            while not self.deaf.is_set() and (message := super().poll()) is not None:
                if isinstance(message, Listen):
                    self.say(Listening(probe=message.probe))  # it does not listen anywhere
                heard.put(message)
        if isinstance(self._socket, TlsSocket):  # the other side waits for it
            self.close()
        heard.put(None)

    def poll(self, wait_s: float = WAIT_S) -> ToClient | None:
        if self._heard is None:  # the handshake is not over
            return super().poll(wait_s)
        try:
            message = self._heard.get(timeout=wait_s)
        except queue.Empty:
            return None
        if message is None:
            self._heard.put(None)
            raise EOFError
        return message

    def dial_again(self) -> None:
        """Look for a coordinator that comes after, as long as it may take in a test."""
        until_s = time.monotonic() + WAIT_S
        while True:
            self.close()
            try:
                return self._dial(self.id, self.number)
            except (OSError, EOFError):  # EOF: the one that dies took the connection still
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.05)

    @property
    def number(self) -> int:
        """Of the generation it is in."""
        return self.generation.number if self.generation else 0

    def enter(self, at_least: int = 1) -> Generation:
        """Wait for a generation, begin it, and say so if it is this worker's to say."""
        told = self.hear(Generation, lambda g: g.number >= at_least)
        self.begin(told)
        return told

    def begin(self, told: Generation) -> None:
        self.generation = told
        if told.roster[:1] == (self.id,):
            self.say(Began(generation=told.number, step=0))

    def beat(self) -> None:
        """A heartbeat, answered: all that was said before has been heard."""
        self.say(self.alive())
        self.hear(Lease)

    def alive(self) -> Alive:
        return Alive(generation=self.number, step=0, waiting=False)

    def step(self, step: int) -> None:
        """Report a step as the leader does, in which all computed alike."""
        assert self.generation is not None
        self.step_with(step, dict.fromkeys(self.generation.roster, 0.1))

    def step_with(self, step: int, compute_s: Mapping[str, float]) -> None:
        """Report a step in which the workers computed for so long."""
        told = self.generation
        assert told is not None
        reports = tuple(
            StepReport(w, share, compute_s[w])
            for w, share in zip(told.roster, told.shares, strict=True)
        )
        seconds = max(compute_s.values())
        self.say(Stepped(generation=told.number, step=step, seconds=seconds, reports=reports))
