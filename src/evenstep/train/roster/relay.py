"""Relays messages between the coordinator and the processes of a host that are one worker.

The first process holds the connection. To the others it passes on generations, what other workers
publish, and renewals of the lease. From them it passes on what they publish, and SIGTERM notices;
everything else it tells the coordinator itself.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BufferedReader

from evenstep.messages import (
    FromClient,
    Generation,
    Lease,
    Leaving,
    Paused,
    Publish,
    Published,
    ToClient,
    Welcome,
    from_client,
    to_client,
)
from evenstep.wire import MAX_BYTES

PASSED_ON = Generation | Published | Lease | Paused


class HostRelay:
    """On the first process of a host."""

    def __init__(
        self,
        links: Sequence[socket.socket],
        welcome: Welcome,
        publish: Callable[[int, str, bytes], None],
        send: Callable[[FromClient], None],
    ) -> None:
        self._links, self._publish, self._send_on = links, publish, send
        self._send(welcome)
        for link in links:
            threading.Thread(
                target=self._read, args=(link,), name="evenstep-relay", daemon=True
            ).start()

    def pass_on(self, message: ToClient) -> None:
        """Pass a message of the coordinator on to the other processes."""
        if isinstance(message, PASSED_ON):
            self._send(message)

    def close(self) -> None:
        """The worker's part in the run is over."""
        for link in self._links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _send(self, message: ToClient) -> None:
        for link in self._links:
            with suppress(OSError):  # that process has ended, or is about to
                link.sendall(to_client.encode(message))

    def _read(self, link: socket.socket) -> None:
        with suppress(OSError), link.makefile("rb") as lines:
            while line := lines.readline(MAX_BYTES):
                message = from_client.decode(line)
                if isinstance(message, Publish):
                    self._publish(message.generation, message.key, message.value)
                elif isinstance(message, Leaving):
                    self._send_on(message)


def follow(link: socket.socket) -> tuple[BufferedReader, socket.socket, Welcome]:
    """On another process: the connection to the first one, and the coordinator's terms."""
    lines = link.makefile("rb")
    line = lines.readline(MAX_BYTES)
    if not line:
        raise ConnectionError("the first process of this host has left the run")
    welcome = to_client.decode(line)
    if not isinstance(welcome, Welcome):
        raise ConnectionError(f"the first process of this host said {type(welcome).__name__}")
    return lines, link, welcome
