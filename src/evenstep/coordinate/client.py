"""The client side, for workers and operators: connect, exchange proofs, and ask one question.

Nobody at the other end is the run's coordinator until it has proved that it knows the run's token.
"""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, TypeVar

from msgspec.structs import replace

from evenstep import messages as msg
from evenstep.coordinate.addresses import EVERYWHERE
from evenstep.coordinate.tls import TlsSocket, shortened
from evenstep.errors import EvenstepError, InvalidInputError
from evenstep.wire import MAX_BYTES

log = logging.getLogger("evenstep")

ANSWER_S = 10.0  # deadline of each read and write of a question
FIRST_DIAL_S = 120.0  # for a worker's first connection
RETRY_S = 0.2  # between attempts

A = TypeVar("A", msg.Answer, msg.Welcome)
T = TypeVar("T")


class StrangerError(EvenstepError, ConnectionError):
    """The process at this address is not the run's coordinator, or does not prove that it is."""


class NoAnswerError(EvenstepError, ConnectionError):
    """The coordinator cannot be reached, or does not do what it is asked."""


class UnreachableError(NoAnswerError):
    """No coordinator answers at its address now; one may later."""


def await_coordinator(dial: Callable[[], T]) -> T:
    """Dial for FIRST_DIAL_S: the coordinator may be busy, not listening yet, or being replaced."""
    until_s, warned = time.monotonic() + FIRST_DIAL_S, False
    while True:
        try:
            return dial()
        except UnreachableError as e:
            if time.monotonic() > until_s:
                raise
            if not warned:
                log.warning("%s Trying again for %g s", e, FIRST_DIAL_S)
            warned = True
        time.sleep(RETRY_S)


@contextmanager
def reaching(address: str) -> Iterator[None]:
    """Raise UnreachableError if nobody answers; errors that another attempt repeats pass."""
    try:
        yield
    except EvenstepError:
        raise
    except ConnectionRefusedError:
        text = f"no coordinator listens at {address}; has the run ended?"
        raise UnreachableError(text) from None
    except OSError as e:
        raise UnreachableError(f"the coordinator at {address} does not answer: {e}.") from None


def connect(host: str, port: int, timeout_s: float, fingerprint: str = "") -> socket.socket:
    """A connection; with `fingerprint`, by TLS and only to the owner of that certificate."""
    name, address = EVERYWHERE.get(host, host), f"{host}:{port}"
    connection = socket.create_connection((name, port), timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not fingerprint:
            return connection
        connection = encrypted = TlsSocket(connection)
        if encrypted.fingerprint != fingerprint:
            raise StrangerError(
                f"the process at {address} has certificate {shortened(encrypted.fingerprint)}, and "
                f"the run's is {shortened(fingerprint)} by its token file; nothing was sent. Is "
                "this the right address? If it is, copy the run's file `token` again."
            )
        return connection
    except (ssl.SSLEOFError, ConnectionResetError):
        connection.close()
        raise UnreachableError(f"the coordinator at {address} hung up; is it ending?") from None
    except ssl.SSLError as e:
        connection.close()
        raise StrangerError(
            f"the process at {address} does not speak TLS ({e.reason}), as the run does by its "
            "token file; nothing was sent. Is this the right address? If it is, copy the run's "
            "file `token` again."
        ) from None
    except BaseException:
        connection.close()
        raise


def handshake(
    connection: socket.socket,
    lines: BinaryIO,
    first: msg.Hello | msg.Ask,
    expects: type[A],
    *,
    token: str,
    address: str,
    max_bytes: int = msg.GREETING_BYTES,
) -> tuple[A | msg.Refused, bool]:
    """Send `first` with a proof; returns the answer, and whether it proves the token too."""
    greeting = _read(lines, msg.GREETING_BYTES, address)
    if not isinstance(greeting, msg.Greeting):
        raise StrangerError(_unexpected(greeting, address))
    nonce = secrets.token_hex(16)
    proved = replace(first, proof=msg.proof(token, greeting.nonce), nonce=nonce)
    connection.sendall(msg.from_stranger.encode(proved))
    answer = _read(lines, max_bytes, address)
    if not isinstance(answer, expects | msg.Refused):
        raise StrangerError(_unexpected(answer, address))
    return answer, msg.proves(answer.proof, token, nonce, msg.COORDINATOR)


def _read(lines: BinaryIO, max_bytes: int, address: str) -> msg.ToClient:
    line = lines.readline(max_bytes)
    if not line:
        raise UnreachableError(
            f"the coordinator at {address} hung up without an answer. Is it ending? Or does the "
            "run use TLS? Then copy its file `token` again: it has the certificate's fingerprint "
            "in a second line."
        )
    if len(line) == max_bytes:
        raise StrangerError(
            f"Unexpected handshake from {address}: a line of {max_bytes} bytes or more."
        )
    return msg.to_client.decode(line)


def _unexpected(message: msg.ToClient, address: str) -> str:
    name = type(message).__name__
    return f"Unexpected handshake from {address}: {name}; is this the right address?"


def ask(host: str, port: int, token: str, ask: msg.Ask, fingerprint: str = "") -> dict[str, Any]:
    """The coordinator's answer; NoAnswerError says why there is none. Fills in `ask.proof`."""
    return ask_from(host, port, token, ask, fingerprint)[0]


def ask_from(
    host: str, port: int, token: str, ask: msg.Ask, fingerprint: str = ""
) -> tuple[dict[str, Any], str]:
    """The coordinator's answer, and this machine's address on the way to it."""
    address = f"{host}:{port}"
    try:
        with (
            reaching(address),
            connect(host, port, ANSWER_S, fingerprint) as there,
            there.makefile("rb") as lines,
        ):
            answer, proved = handshake(
                there, lines, ask, msg.Answer, token=token, address=address, max_bytes=MAX_BYTES
            )
            local = str(there.getsockname()[0])
    except UnreachableError:
        raise
    except StrangerError as e:
        raise NoAnswerError(str(e)) from None
    except (OSError, InvalidInputError) as e:
        raise NoAnswerError(f"the coordinator at {address} does not answer: {e}") from None
    if isinstance(answer, msg.Refused):
        raise NoAnswerError(answer.why)
    if not proved:
        raise NoAnswerError(
            "the process that answers does not know the run's token: it is not the run's "
            "coordinator. Has the run ended, and does another process use its port?"
        )
    if answer.problem:
        raise NoAnswerError(answer.problem)
    return answer.told, local
