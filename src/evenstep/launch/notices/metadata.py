"""Questions to a cloud's metadata server, which answers from the machine itself.

No proxy is used, whatever the environment says: another host would be asked about its own machine.
Nothing that the server sends can hold a worker up or fill its memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from socket import SHUT_RDWR, socket
from threading import Event, Timer
from typing import NamedTuple
from urllib.parse import urlsplit

ANSWER_S = 5.0  # to connect, and for the whole answer after that
MOST_BYTES = 2**16


class MetadataAnswer(NamedTuple):
    status: int
    text: str
    etag: str = ""


def ask_metadata(
    endpoint: str,
    path: str,
    headers: Mapping[str, str],
    *,
    method: str = "GET",
    answer_s: float = ANSWER_S,
) -> MetadataAnswer:
    """One question. OSError: no server answers, or it does not speak HTTP."""
    where = urlsplit(endpoint)
    if where.scheme != "http" or not where.hostname:
        raise OSError(f"{endpoint} is not the address of a metadata server: http://HOST[:PORT]")
    connection = HTTPConnection(where.hostname, where.port or 80, timeout=answer_s)
    # A timeout of the socket is for each piece, and a server may send one byte at a time.
    is_late, deadline = Event(), None
    try:
        connection.connect()
        # The socket itself: a connection that ends with its answer forgets it at the first header.
        deadline = Timer(answer_s, _break_off, [connection.sock, is_late])
        deadline.daemon = True
        deadline.start()
        connection.request(method, path, headers=dict(headers))
        response = connection.getresponse()
        content = response.read(MOST_BYTES)
    except (HTTPException, ConnectionResetError, BrokenPipeError) as e:
        if not is_late.is_set():
            raise OSError(f"{endpoint} does not speak HTTP: {type(e).__name__}") from None
    finally:
        if deadline is not None:
            deadline.cancel()
            deadline.join()
        connection.close()
    if is_late.is_set():
        raise TimeoutError(f"{endpoint} has not answered within {answer_s:g} s")
    text = content.decode(errors="replace")
    return MetadataAnswer(response.status, text, response.getheader("ETag", ""))


def _break_off(sock: socket, is_late: Event) -> None:
    is_late.set()  # first: the other thread wakes at once
    with suppress(OSError):
        sock.shutdown(SHUT_RDWR)


def unexpected(endpoint: str, path: str, answer: MetadataAnswer) -> OSError:
    """An unexpected metadata response."""
    return OSError(f"{endpoint}{path} answers {answer.status}: {answer.text[:100]!r}")
