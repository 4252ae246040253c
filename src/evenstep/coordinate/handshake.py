"""The client side of the handshake, for workers and operators: connect, and exchange proofs.

Nobody at the other end is the run's coordinator until it has proved that it knows the run's token.
"""

from __future__ import annotations

import secrets
import socket
import ssl
from typing import BinaryIO, TypeVar

from msgspec.structs import replace

from evenstep.coordinate.addresses import EVERYWHERE
from evenstep.errors import EvenstepError
from evenstep.messages import (
    COORDINATOR,
    GREETING_BYTES,
    Answer,
    Ask,
    Greeting,
    Hello,
    Refused,
    ToClient,
    Welcome,
    from_stranger,
    proof,
    proves,
    to_client,
)

A = TypeVar("A", Answer, Welcome)


class StrangerError(EvenstepError, ConnectionError):
    """The process at this address is not the run's coordinator, or does not prove that it is."""


class HungUpError(EvenstepError, ConnectionError):
    """The connection was closed during the handshake."""


def connect(host: str, port: int, timeout_s: float, tls_ca: str = "") -> socket.socket:
    """A connection; with `tls_ca`, only to a host with a certificate from that file."""
    name = EVERYWHERE.get(host, host)
    connection = socket.create_connection((name, port), timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not tls_ca:
            return connection
        context = ssl.create_default_context(cafile=tls_ca)
        # The file may hold the coordinator's own certificate without its signer's.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context.wrap_socket(connection, server_hostname=name)
    except BaseException:
        connection.close()
        raise


def handshake(
    connection: socket.socket,
    lines: BinaryIO,
    first: Hello | Ask,
    expects: type[A],
    *,
    token: str,
    address: str,
    max_bytes: int = GREETING_BYTES,
) -> tuple[A | Refused, bool]:
    """Send `first` with a proof; returns the answer, and whether it proves the token too."""
    greeting = _read(lines, GREETING_BYTES, address)
    if not isinstance(greeting, Greeting):
        raise StrangerError(_unexpected(greeting, address))
    nonce = secrets.token_hex(16)
    proved = replace(first, proof=proof(token, greeting.nonce), nonce=nonce)
    connection.sendall(from_stranger.encode(proved))
    answer = _read(lines, max_bytes, address)
    if not isinstance(answer, expects | Refused):
        raise StrangerError(_unexpected(answer, address))
    return answer, proves(answer.proof, token, nonce, COORDINATOR)


def _read(lines: BinaryIO, max_bytes: int, address: str) -> ToClient:
    line = lines.readline(max_bytes)
    if not line:
        raise HungUpError(
            f"the coordinator at {address} hung up; does it speak TLS, or is it ending?"
        )
    if len(line) == max_bytes:
        raise StrangerError(
            f"Unexpected handshake from {address}: a line of {max_bytes} bytes or more."
        )
    return to_client.decode(line)


def _unexpected(message: ToClient, address: str) -> str:
    name = type(message).__name__
    return f"Unexpected handshake from {address}: {name}; is this the right address?"
