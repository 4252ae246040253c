"""The coordinator's sockets: handshakes, bounded lines, and no client that can block the others.

A client gets a nonce, and little time and memory until it has proved that it knows the token. Then
its messages are read; bad ones are refused and counted. A client that does not read is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections import Counter
from contextlib import suppress
from typing import Protocol

from msgspec.structs import replace

from evenstep.coordinate.addresses import spell
from evenstep.coordinate.events import AnyInput, Disconnected, Heard, SendReply
from evenstep.errors import InvalidInputError
from evenstep.messages import (
    COORDINATOR,
    GREETING_BYTES,
    PROTOCOL,
    Answer,
    Ask,
    Greeting,
    Hello,
    Refused,
    ToClient,
    Welcome,
    from_client,
    from_stranger,
    proof,
    proves,
    to_client,
)
from evenstep.types import WorkerId
from evenstep.wire import MAX_BYTES

log = logging.getLogger("evenstep")

PROOF_S = 5.0  # deadline of the handshake
MAX_STRANGERS = 200  # clients without a proof at once; beyond that the oldest is dropped
UNREAD_BYTES = 4 * 2**20  # buffered for one client; beyond that it is dropped
HANG_UP_S = 5.0  # for the last line to be read
MAX_MISTAKES = 100  # bad messages of one connection


class Listener(Protocol):
    """Handles what clients say. `answer` replies before it returns."""

    def answer(self, first: Hello | Ask, reply: SendReply) -> None: ...
    def handle(self, event: AnyInput) -> None: ...


class _RefusedError(Exception):
    """A client is refused: counted under `reason`, told `told`."""

    def __init__(self, reason: str, told: str = "", proof: str = "") -> None:
        super().__init__(reason)
        self.reason, self.told, self.proof = reason, told or reason, proof


class Server:
    """Listens for workers and operators, in the event loop it was opened in."""

    def __init__(self, token: str, listener: Listener) -> None:
        self._token, self._listener = token, listener
        self._server: asyncio.Server | None = None
        self._workers: dict[WorkerId, asyncio.StreamWriter] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # without a proof, oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self.refused: Counter[str] = Counter()

    async def open(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> str:
        """Listen; returns the address with the port that is used."""
        timeout_s = PROOF_S if tls else None
        self._server = await asyncio.start_server(
            self._meet, host, port, ssl=tls, ssl_handshake_timeout=timeout_s, limit=GREETING_BYTES
        )
        return spell(host, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Close all connections, with a little time for the last lines to be read."""
        if self._server is not None:
            self._server.close()
        for worker in list(self._workers):
            self.hang_up(worker)
        for writer in list(self._strangers):
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=HANG_UP_S)
        for task in list(self._tasks):
            task.cancel()

    def send(self, message: ToClient, *workers: WorkerId) -> None:
        """Send a message, without waiting for anyone to read it."""
        line = to_client.encode(message)
        for worker in workers:
            if (writer := self._workers.get(worker)) is not None:
                self._write_line(writer, line)

    def hang_up(self, worker: WorkerId) -> None:
        """Close a worker's connection once it has read what was sent."""
        writer = self._workers.pop(worker, None)
        if writer is not None:
            self._keep(asyncio.create_task(_hang_up(writer)))

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._keep(task)
        lines = _Lines(reader)
        try:
            first = await self._prove(lines, writer)
            if (worker := self._answer(writer, first)) is not None:
                await self._hear(worker, lines, writer)
        except _RefusedError as e:
            self.refused[e.reason] += 1
            self._write(writer, Refused(why=e.told, proof=e.proof))
        except (OSError, EOFError):
            pass  # the client hung up
        except Exception:
            log.exception("a bug in the coordinator")
        finally:
            self._strangers.pop(writer, None)
            await _hang_up(writer)

    async def _prove(self, lines: _Lines, writer: asyncio.StreamWriter) -> Hello | Ask:
        """The first message of a client that knows the token."""
        self._strangers[writer] = None
        if len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            self.refused["too many at once"] += 1
            oldest.transport.abort()
        nonce = secrets.token_hex(16)
        self._write(writer, Greeting(nonce=nonce))
        try:
            async with asyncio.timeout(PROOF_S):
                line = await lines.next(GREETING_BYTES)
        except TimeoutError:
            raise _RefusedError("no proof in time") from None
        except EOFError:
            if self._strangers.pop(writer, self) is None:
                self.refused["hung up before a word"] += 1
            raise
        try:
            first = from_stranger.decode(line)
        except InvalidInputError as e:
            raise _RefusedError("bad first line", str(e)) from None
        if first.protocol != PROTOCOL:
            told = f"this run speaks protocol {PROTOCOL}, you speak {first.protocol}"
            raise _RefusedError("wrong protocol", told)
        if not proves(first.proof, self._token, nonce):
            raise _RefusedError("wrong token", "the token is not that of this run")
        self._strangers.pop(writer, None)
        return first

    def _answer(self, writer: asyncio.StreamWriter, first: Hello | Ask) -> WorkerId | None:
        """Answer the first message, with the coordinator's own proof; the worker, if welcome."""
        # Only to a client that has proved itself: others could relay it.
        proved = proof(self._token, first.nonce, COORDINATOR)
        answers: list[Welcome | Refused | Answer] = []

        def reply(answer: Welcome | Refused | Answer) -> None:
            answers.append(answer)
            if isinstance(answer, Welcome):
                self._workers[answer.worker] = writer
            if not isinstance(answer, Refused):
                self._write(writer, replace(answer, proof=proved))

        self._listener.answer(first, reply)
        (answer,) = answers
        if isinstance(answer, Refused):
            raise _RefusedError("not taken in", answer.why, proved)
        return answer.worker if isinstance(answer, Welcome) else None

    async def _hear(self, worker: WorkerId, lines: _Lines, writer: asyncio.StreamWriter) -> None:
        mistakes = 0
        try:
            while mistakes < MAX_MISTAKES:
                line = await lines.next(MAX_BYTES)
                try:
                    message = from_client.decode(line)
                    if isinstance(message, Hello | Ask):
                        raise InvalidInputError("message", "is for strangers")
                    self._listener.handle(Heard(worker=worker, message=message))
                except InvalidInputError as e:
                    mistakes += 1
                    self.refused["bad message"] += 1
                    log.warning("bad message from %s: %s", worker, e)
        finally:
            if self._workers.get(worker) is writer:  # else the coordinator hung up
                del self._workers[worker]
                self._listener.handle(Disconnected(worker=worker))

    def _write(self, writer: asyncio.StreamWriter, message: ToClient) -> None:
        self._write_line(writer, to_client.encode(message))

    def _write_line(self, writer: asyncio.StreamWriter, line: bytes) -> None:
        if writer.transport.get_write_buffer_size() + len(line) > UNREAD_BYTES:
            self.refused["does not read"] += 1
            writer.transport.abort()
        elif not writer.is_closing():
            writer.write(line)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Lines:
    """Lines of a stream, each no longer than allowed at that point."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader, self._held = reader, bytearray()

    async def next(self, max_bytes: int) -> bytes:
        searched = 0
        while (end := self._held.find(b"\n", searched)) < 0:
            searched = len(self._held)
            if searched > max_bytes:
                raise _RefusedError("line too long", f"a line is at most {max_bytes} bytes long")
            chunk = await self._reader.read(2**16)
            if not chunk:
                raise EOFError
            self._held += chunk
        if end > max_bytes:
            raise _RefusedError("line too long", f"a line is at most {max_bytes} bytes long")
        line = bytes(self._held[:end])
        del self._held[: end + 1]
        return line


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    """Close, without waiting long for the last line to be read."""
    try:
        async with asyncio.timeout(HANG_UP_S):
            writer.close()
            await writer.wait_closed()
    except (TimeoutError, OSError):
        with suppress(OSError):
            writer.transport.abort()
