"""The coordinator's sockets: handshakes and bounded lines; no client can block the others.

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
from math import inf
from typing import Protocol

from msgspec.structs import replace

from evenstep import messages as msg
from evenstep.coordinate.addresses import spell
from evenstep.coordinate.events import AnyInput, Disconnected, Heard, SendReply
from evenstep.errors import InvalidInputError
from evenstep.types import WorkerId
from evenstep.wire import MAX_BYTES

log = logging.getLogger("evenstep")

PROOF_S = 5.0  # deadline of the handshake
MAX_STRANGERS = 200  # clients without a proof at once; beyond that the oldest is dropped
UNREAD_BYTES = 4 * 2**20  # buffered for one client; beyond that it is dropped
HANG_UP_S = 5.0  # for the last line to be read
MAX_MISTAKES = 100  # bad messages of one connection
MESSAGES_PER_S, BURST = 500.0, 5000.0  # read of one connection; a leader sends a few a second


class Listener(Protocol):
    """Handles the messages of clients. `answer` replies before it returns."""

    def answer(self, first: msg.Hello | msg.Ask, reply: SendReply) -> None: ...
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
        self._tls: ssl.SSLContext | None = None
        self._workers: dict[WorkerId, asyncio.StreamWriter] = {}
        self._strangers: dict[asyncio.Task[None], None] = {}  # without a proof, oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self.refused: Counter[str] = Counter()

    async def open(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> str:
        """Listen; returns the address with the port that is used."""
        self._tls = tls
        self._server = await asyncio.start_server(self._meet, host, port, limit=msg.GREETING_BYTES)
        return spell(host, self._server.sockets[0].getsockname()[1])

    @property
    def sockets(self) -> list[tuple[str, int]]:
        """The addresses and ports where it listens: several if the host name has several."""
        listening = self._server.sockets if self._server is not None else ()
        return [s.getsockname()[:2] for s in listening]

    async def close(self) -> None:
        """Close all connections, with a little time for the last lines to be read."""
        if self._server is not None:
            self._server.close()
        for worker in list(self._workers):
            self.hang_up(worker)
        for stranger in self._strangers:
            stranger.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=HANG_UP_S)
        for task in (unfinished := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)

    def send(self, message: msg.ToClient, *workers: WorkerId) -> None:
        """Send a message, without waiting for anyone to read it."""
        line = msg.to_client.encode(message)
        for worker in workers:
            if (writer := self._workers.get(worker)) is not None:
                self._write(writer, line)

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
            first = await self._prove(task, lines, writer)
            if (worker := self._answer(writer, first)) is not None:
                await self._hear(worker, lines, writer)
        except _RefusedError as e:
            self.refused[e.reason] += 1
            self._write(writer, msg.to_client.encode(msg.Refused(why=e.told, proof=e.proof)))
        except (OSError, EOFError):
            pass  # the client hung up
        except asyncio.CancelledError:  # one stranger too many, or the end
            writer.transport.abort()
        except Exception:
            log.exception("a bug in the coordinator")
        finally:
            self._strangers.pop(task, None)
            await _hang_up(writer)

    async def _prove(
        self, task: asyncio.Task[None], lines: _Lines, writer: asyncio.StreamWriter
    ) -> msg.Hello | msg.Ask:
        """The first message of a client that knows the token."""
        self._strangers[task] = None
        if len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            self.refused["too many at once"] += 1
            oldest.cancel()
        nonce = secrets.token_hex(16)
        try:
            async with asyncio.timeout(PROOF_S):
                # Not in `start_server`: a client that does not begin TLS is a stranger, too.
                if self._tls is not None:
                    await writer.start_tls(self._tls)
                self._write(writer, msg.to_client.encode(msg.Greeting(nonce=nonce)))
                line = await lines.next(msg.GREETING_BYTES)
        except TimeoutError:
            raise _RefusedError("no proof in time") from None
        except ssl.SSLError:
            self.refused["bad TLS handshake"] += 1
            raise
        except (EOFError, ConnectionError):
            if self._strangers.pop(task, self) is None:
                self.refused["hung up before a word"] += 1
            raise
        try:
            first = msg.from_stranger.decode(line)
        except InvalidInputError as e:
            raise _RefusedError("bad first line", str(e)) from None
        if first.protocol != msg.PROTOCOL:
            told = f"this run speaks protocol {msg.PROTOCOL}, you speak {first.protocol}"
            raise _RefusedError("wrong protocol", told)
        if not msg.proves(first.proof, self._token, nonce):
            raise _RefusedError("wrong token", "the token is not that of this run")
        del self._strangers[task]
        return first

    def _answer(self, writer: asyncio.StreamWriter, first: msg.Hello | msg.Ask) -> WorkerId | None:
        """Answer the first message, with the coordinator's own proof; the worker, if welcome."""
        # Prove it only to a client that has proved itself: a stranger could relay the proof.
        proved = msg.proof(self._token, first.nonce, msg.COORDINATOR)
        answers: list[msg.Welcome | msg.Refused | msg.Answer] = []

        def reply(answer: msg.Welcome | msg.Refused | msg.Answer) -> None:
            answers.append(answer)
            if isinstance(answer, msg.Welcome):
                self._workers[answer.worker] = writer
            if not isinstance(answer, msg.Refused):
                self._write(writer, msg.to_client.encode(replace(answer, proof=proved)))

        self._listener.answer(first, reply)
        (answer,) = answers
        if isinstance(answer, msg.Refused):
            raise _RefusedError("not taken in", answer.why, proved)
        return answer.worker if isinstance(answer, msg.Welcome) else None

    async def _hear(self, worker: WorkerId, lines: _Lines, writer: asyncio.StreamWriter) -> None:
        mistakes, read_s, warned, broken = 0, -inf, False, False
        try:
            while mistakes < MAX_MISTAKES:
                line = await lines.next(MAX_BYTES)
                # Token bucket: lines beyond the rate stay unread, which slows only their sender.
                now_s = asyncio.get_running_loop().time()
                read_s = max(read_s, now_s - BURST / MESSAGES_PER_S) + 1 / MESSAGES_PER_S
                if read_s > now_s:
                    if not warned:
                        log.warning("%s sends over %g messages a second", worker, MESSAGES_PER_S)
                    warned = True
                    await asyncio.sleep(read_s - now_s)
                try:
                    message = msg.from_client.decode(line)
                    if isinstance(message, msg.Hello | msg.Ask):
                        raise InvalidInputError("message", "is for strangers")
                    self._listener.handle(Heard(worker=worker, message=message))
                except InvalidInputError as e:
                    mistakes += 1
                    self.refused["bad message"] += 1
                    log.warning("bad message from %s: %s", worker, e)
        except OSError as e:
            # A reset comes from the kernel of its host: the process has ended. Else, as after a
            # timeout, nobody knows.
            broken = not isinstance(e, ConnectionResetError)
            raise
        finally:
            if self._workers.get(worker) is writer:  # else the coordinator hung up
                del self._workers[worker]
                self._listener.handle(Disconnected(worker=worker, broken=broken))

    def _write(self, writer: asyncio.StreamWriter, line: bytes) -> None:
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
        while (end := self._held.find(b"\n", searched)) < 0 and len(self._held) <= max_bytes:
            searched = len(self._held)
            chunk = await self._reader.read(2**16)
            if not chunk:
                raise EOFError
            self._held += chunk
        if not 0 <= end <= max_bytes:
            raise _RefusedError("line too long", f"a line is at most {max_bytes} bytes long")
        line = bytes(self._held[:end])
        del self._held[: end + 1]
        return line


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    """Close, without waiting long for the last line to be read."""
    if writer.is_closing():  # it is lost; after a TLS handshake that failed nobody is told when
        return
    try:
        async with asyncio.timeout(HANG_UP_S):
            writer.close()
            await writer.wait_closed()
    except (TimeoutError, OSError):
        pass
    finally:
        with suppress(OSError):
            writer.transport.abort()
