"""Tests connections to other workers when the coordinator asks, in threads of its own.

Nothing is read from a process that connects: it is sent a proof that this is the worker that was
meant, and the connection is closed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from evenstep.messages import LISTENER, FromClient, Listen, Listening, Reach, Reached, proof

RETRY_S = 0.05  # after a connection that was not accepted


class Links:
    """Listens for other workers, and tests which ones it can reach. `send` must not block."""

    def __init__(self, address: str, token: str, send: Callable[[FromClient], None]) -> None:
        # The user's choice of interface: Gloo knows its address.
        self._address = "" if "GLOO_SOCKET_IFNAME" in os.environ else address
        self._token, self._send = token, send
        self._listener: socket.socket | None = None  # of the newest test

    def listen(self, asked: Listen, worker: str) -> None:
        """Let other workers connect for a while."""
        _start(self._listen, asked, worker)

    def reach(self, asked: Reach) -> None:
        """Report to which workers this one cannot connect."""
        _start(self._reach, asked)

    def close_in_child(self) -> None:
        """In a forked process: it must not hold the port open."""
        if (listener := self._listener) is not None and listener.fileno() >= 0:
            os.close(listener.detach())

    def _listen(self, asked: Listen, worker: str) -> None:
        until_s = time.monotonic() + asked.seconds
        try:
            if not self._address:  # would bind all addresses
                raise OSError
            family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
            listener = socket.create_server((self._address, 0), family=family)
        except OSError:
            self._send(Listening(probe=asked.probe))
            return
        earlier, self._listener = self._listener, listener
        if earlier is not None:
            with suppress(OSError):
                earlier.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
        host, port = listener.getsockname()[:2]
        self._send(Listening(probe=asked.probe, host=host, port=port))
        line = self._proof(asked.probe, worker)
        with listener:
            while (left_s := until_s - time.monotonic()) > 0 and self._listener is listener:
                listener.settimeout(left_s)
                try:
                    there, _ = listener.accept()
                except TimeoutError:
                    return
                except OSError:
                    time.sleep(RETRY_S)
                    continue
                with there, suppress(OSError):
                    there.sendall(line)

    def _reach(self, asked: Reach) -> None:
        async def dial_all() -> list[bool]:
            dials = (
                _connects(host, port, self._proof(asked.probe, worker), asked.within_s)
                for worker, (host, port) in asked.doors.items()
            )
            return await asyncio.gather(*dials)

        reached = zip(asked.doors, asyncio.run(dial_all()), strict=True)
        unreached = tuple(worker for worker, connects in reached if not connects)
        self._send(Reached(probe=asked.probe, unreached=unreached))

    def _proof(self, probe: str, worker: str) -> bytes:
        return proof(self._token, f"{probe} {worker}", LISTENER).encode()


async def _connects(host: str, port: int, expected: bytes, within_s: float) -> bool:
    """Whether the expected worker answers at an address in time.

    A refused connection is retried: the worker may have just ended, and the coordinator needs time
    to learn of that.
    """
    try:
        async with asyncio.timeout(within_s):
            while True:
                try:
                    reader, writer = await asyncio.open_connection(host, port)
                    break
                except OSError:
                    await asyncio.sleep(RETRY_S)
    except TimeoutError:
        return False
    try:
        async with asyncio.timeout(within_s):
            return await reader.readexactly(len(expected)) == expected
    except TimeoutError:
        return True  # connected, so packets go both ways; its threads are just busy
    except (OSError, EOFError):
        return False
    finally:
        writer.close()


def _start(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, name="evenstep-links", daemon=True).start()
