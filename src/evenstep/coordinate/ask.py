"""One question of an operator to a running coordinator, and its answer."""

from __future__ import annotations

from typing import Any

from evenstep.coordinate.handshake import connect, handshake
from evenstep.errors import EvenstepError, InvalidInputError
from evenstep.messages import Answer, Ask, Refused
from evenstep.wire import MAX_BYTES

ANSWER_S = 10.0


class NoAnswerError(EvenstepError, ConnectionError):
    """The coordinator cannot be reached, or does not do what it is asked."""


def ask(host: str, port: int, token: str, ask: Ask, tls_ca: str = "") -> dict[str, Any]:
    """The coordinator's answer; NoAnswerError says why there is none. Fills in `ask.proof`."""
    return ask_from(host, port, token, ask, tls_ca)[0]


def ask_from(
    host: str, port: int, token: str, ask: Ask, tls_ca: str = ""
) -> tuple[dict[str, Any], str]:
    """The coordinator's answer, and this machine's address on the way to it."""
    address = f"{host}:{port}"
    try:
        with (
            connect(host, port, ANSWER_S, tls_ca) as connection,
            connection.makefile("rb") as lines,
        ):
            answer, proved = handshake(
                connection,
                lines,
                ask,
                Answer,
                token=token,
                address=address,
                max_bytes=MAX_BYTES,
            )
            return _content(answer, proved), str(connection.getsockname()[0])
    except NoAnswerError:
        raise
    except ConnectionRefusedError:
        raise NoAnswerError(f"no coordinator listens at {address}; has the run ended?") from None
    except (OSError, InvalidInputError) as e:
        raise NoAnswerError(f"the coordinator at {address} does not answer: {e}") from None


def _content(answer: Answer | Refused, proved: bool) -> dict[str, Any]:
    if isinstance(answer, Refused):
        raise NoAnswerError(answer.why)
    if not proved:
        raise NoAnswerError(
            "the process that answers does not know the run's token: it is not the run's "
            "coordinator. Has the run ended, and does another process use its port?"
        )
    if answer.problem:
        raise NoAnswerError(answer.problem)
    return answer.told
