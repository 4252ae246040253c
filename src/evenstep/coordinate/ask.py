"""What an operator asks of a running coordinator: one question, one answer."""

from __future__ import annotations

import socket
import ssl
from typing import Any

from evenstep.errors import EvenstepError, InvalidInputError
from evenstep.messages import (
    Answer,
    Ask,
    Greeting,
    Refused,
    ToClient,
    from_stranger,
    proof,
    to_client,
)
from evenstep.wire import MAX_BYTES

ANSWER_S = 10.0
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # listened at, but nowhere to go to


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
        with socket.create_connection((EVERYWHERE.get(host, host), port), ANSWER_S) as plain:
            mine = str(plain.getsockname()[0])
            if not tls_ca:
                return _asked(plain, token, ask), mine
            context = ssl.create_default_context(cafile=tls_ca)
            with context.wrap_socket(plain, server_hostname=host) as there:
                return _asked(there, token, ask), mine
    except NoAnswerError:
        raise
    except ConnectionRefusedError:
        raise NoAnswerError(f"no coordinator listens at {where}; has the run ended?") from None
    except (OSError, InvalidInputError) as e:
        raise NoAnswerError(f"the coordinator at {where} does not answer: {e}") from None


def _asked(there: socket.socket, token: str, ask: Ask) -> dict[str, Any]:
    with there.makefile("rb") as lines:
        greeting = _line(lines.readline(MAX_BYTES))
        if not isinstance(greeting, Greeting):
            raise NoAnswerError("who listens there is no coordinator")
        proved = Ask(
            proof=proof(token, greeting.nonce),
            what=ask.what,
            num_workers=ask.num_workers,
            worker=ask.worker,
        )
        there.sendall(from_stranger.encode(proved))
        answer = _line(lines.readline(MAX_BYTES))
    if isinstance(answer, Refused):
        raise NoAnswerError(answer.why)
    if not isinstance(answer, Answer):
        raise NoAnswerError(f"the coordinator said {type(answer).__name__} instead of an answer")
    if answer.problem:
        raise NoAnswerError(answer.problem)
    return answer.told


def _line(line: bytes) -> ToClient:
    if not line:
        raise NoAnswerError("the coordinator hung up; is it speaking TLS, or ending?")
    return to_client.decode(line)
