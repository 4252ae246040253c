"""The client side, for workers and operators: connect, exchange proofs, and ask one question.

The process at the other end is a stranger until it has proved that it knows the run's token.
"""

from __future__ import annotations

import logging
import math
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
FIRST_DIAL_S = 120.0  # for a first connection, unless told otherwise
RETRY_S, MAX_RETRY_S = 0.2, 2.0  # pauses between attempts double from the first to the second
CHANCE = secrets.SystemRandom()
REMIND_S = 60.0  # between two lines about a wait

A = TypeVar("A", msg.Answer, msg.Welcome)
T = TypeVar("T")


class StrangerError(EvenstepError, ConnectionError):
    """The process at this address has not proved to be the run's coordinator."""


class NoAnswerError(EvenstepError, ConnectionError):
    """The coordinator cannot be reached, or does not do what it is asked."""


class UnreachableError(NoAnswerError):
    """No coordinator answers at its address now; one may later."""


def retry_pauses(chance: Callable[[], float] = CHANCE.random) -> Iterator[float]:
    """Pauses between attempts: longer and longer up to MAX_RETRY_S, and half of each by chance.

    So many workers that lost one coordinator do not all dial at the same moments.
    """
    pause_s = RETRY_S
    while True:
        yield pause_s * (1 + chance()) / 2
        pause_s = min(MAX_RETRY_S, 2 * pause_s)


def await_coordinator(dial: Callable[[], T], wait_s: float | None = None) -> T:
    """Dial for so long: the coordinator may be busy, not listening yet, or being replaced."""
    wait_s = FIRST_DIAL_S if wait_s is None else wait_s
    began_s, told_s = time.monotonic(), -math.inf
    for pause_s in retry_pauses():
        try:
            return dial()
        except UnreachableError as e:
            now_s = time.monotonic()
            left_s = began_s + wait_s - now_s
            if left_s <= 0:
                raise
            if now_s - told_s > REMIND_S:
                log.warning("%s Trying again for %.0f s", e, left_s)
                told_s = now_s
            time.sleep(min(pause_s, left_s))
    raise AssertionError("pauses do not end")


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
