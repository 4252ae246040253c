"""Serves the page over HTTP, bounded in connections, in the size of requests and in patience."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from evenstep.errors import ConfigError

log = logging.getLogger("evenstep")

MAX_CONNECTIONS = 100
MAX_HEAD_BYTES = 16 * 1024
REQUEST_S = 10.0
"""Deadline for a whole request to arrive."""

STALLED_S = 30.0
"""Deadline for a browser that does not read its responses."""


class BoundedProtocol(H11Protocol):
    """Closes connections of slow clients, and connections beyond MAX_CONNECTIONS."""

    _request_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._time_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        with suppress(h11.LocalProtocolError):  # of a connection that ends within a request
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _time_request(self) -> None:
        """One deadline from a request's first byte to its last; the first begins at once."""
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            if self._request_timer is None:
                self._request_timer = self.loop.call_later(REQUEST_S, self.transport.abort)
        elif self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _stop_timers(self) -> None:
        for timer in (self._request_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; a ConfigError says why there can be none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except (OSError, OverflowError) as e:
        why = getattr(e, "strerror", None) or str(e)
        way_out = "; 0 picks a free port" if port else ""
        problem = f"cannot listen at {host}:{port}: {why}{way_out}"
        raise ConfigError("--host, --port", problem) from None


def make_server(app: ASGIApp) -> uvicorn.Server:
    """A server for the page; it logs nothing but errors."""
    options: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        limit_concurrency=None,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
        **options,
    )
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    return uvicorn.Server(config)
