"""A proxy that passes on what it is sent, and records it."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Self

from tests.coordinate.fake import WAIT_S


class RecordingProxy:
    """Listens at `address`, in front of another port of this machine."""

    def __init__(self, port: int) -> None:
        self.sent, self.answered = bytearray(), bytearray()  # by clients; to them
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.address = f"127.0.0.1:{self.port}"
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                self._open.append(here)
                try:
                    there = socket.create_connection(("127.0.0.1", self._port), WAIT_S)
                except ConnectionRefusedError:
                    here.close()
                    continue
                self._open.append(there)
                for way in ((here, there, self.sent), (there, here, self.answered)):
                    threading.Thread(target=self._pass_on, args=way, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, record: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                record += data
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
