"""What an operator asks of a running coordinator: one question, one answer."""

from __future__ import annotations

import secrets
import socket
from typing import Any

from msgspec.structs import replace

from evenstep.coordinate.dial import dial
from evenstep.errors import EvenstepError, InvalidInputError
from evenstep.messages import (
    COORDINATOR,
    GREETING_BYTES,
    Answer,
    Ask,
    Greeting,
    Refused,
    ToClient,
    from_stranger,
    proof,
    proves,
    to_client,
)
from evenstep.wire import MAX_BYTES

ANSWER_S = 10.0


class NoAnswerError(EvenstepError, ConnectionError):
    """The coordinator is not there, or does not do what it is asked."""


def ask(host: str, port: int, token: str, ask: Ask, tls_ca: str = "") -> dict[str, Any]:
    """What the coordinator tells. NoAnswerError: why it does not. `ask.proof` is filled in."""
    return ask_from(host, port, token, ask, tls_ca)[0]


def ask_from(
    host: str, port: int, token: str, ask: Ask, tls_ca: str = ""
) -> tuple[dict[str, Any], str]:
    """What the coordinator tells, and the address of this machine that it was asked from."""
    where = f"{host}:{port}"
    try:
        with dial(host, port, ANSWER_S, tls_ca) as there:
            return _asked(there, token, ask), str(there.getsockname()[0])
    except NoAnswerError:
        raise
    except ConnectionRefusedError:
        raise NoAnswerError(f"no coordinator listens at {where}; has the run ended?") from None
    except (OSError, InvalidInputError) as e:
        raise NoAnswerError(f"the coordinator at {where} does not answer: {e}") from None


def _asked(there: socket.socket, token: str, ask: Ask) -> dict[str, Any]:
    with there.makefile("rb") as lines:
        greeting = _line(lines.readline(GREETING_BYTES))
        if not isinstance(greeting, Greeting):
            raise NoAnswerError("who listens there is no coordinator")
        nonce = secrets.token_hex(16)
        proved = replace(ask, proof=proof(token, greeting.nonce), nonce=nonce)
        there.sendall(from_stranger.encode(proved))
        answer = _line(lines.readline(MAX_BYTES))
    if isinstance(answer, Refused):
        raise NoAnswerError(answer.why)
    if not isinstance(answer, Answer):
        raise NoAnswerError(f"the coordinator said {type(answer).__name__} instead of an answer")
    if not proves(answer.proof, token, nonce, COORDINATOR):
        raise NoAnswerError(
            "who answers there does not know the run's token: it is not the run's coordinator. "
            "Has the run ended, and its port passed to somebody else?"
        )
    if answer.problem:
        raise NoAnswerError(answer.problem)
    return answer.told


def _line(line: bytes) -> ToClient:
    if not line:
        raise NoAnswerError("the coordinator hung up; is it speaking TLS, or ending?")
    return to_client.decode(line)
