"""A run's page, put together: what it shows, its keys, and the port that it listens at."""

from __future__ import annotations

import asyncio
import secrets
import socket

from evenstep.coordinate.addresses import EVERYWHERE, spell
from evenstep.page.access import KEY_BYTES, Keys
from evenstep.page.app import Page
from evenstep.page.guard import Guard
from evenstep.page.server import listen, make_server
from evenstep.page.watched import Watched

EXIT_POLL_S = 0.2


class Site:
    """Listens from the beginning, with fresh keys; `serve` serves until a signal or `close`."""

    def __init__(self, run: Watched, *, host: str, port: int, commands: bool) -> None:
        self.keys = Keys(secrets.token_hex(KEY_BYTES))
        self._host, self._run, self._page = host, run, Page(run, self.keys, commands=commands)
        self._listening = listen(host, port)
        self.port: int = self._listening.getsockname()[1]
        guard = Guard(self._page.app, keys=self.keys, port=self.port, names=_names(host))
        self._server = make_server(guard)

    @property
    def address(self) -> str:
        """HOST:PORT, as seen from this machine."""
        return spell(EVERYWHERE.get(self._host, self._host), self.port)

    @property
    def url(self) -> str:
        """What to open: with the key, which a browser keeps as a cookie."""
        return f"http://{self.address}/?key={self.keys.full}"

    async def serve(self) -> None:
        """Serve; browsers that wait for news are let go at the end."""
        serving = asyncio.create_task(self._server.serve(sockets=[self._listening]))
        # Read while the URL is on its way into a browser.
        reading = asyncio.create_task(asyncio.to_thread(self._run.follow))
        while not serving.done() and not self._server.should_exit:
            await asyncio.wait([serving], timeout=EXIT_POLL_S)
        self._page.feed.close()
        await serving
        await reading

    def close(self) -> None:
        """Have `serve` end; from any thread."""
        self._server.should_exit = True


def _names(host: str) -> set[str]:
    """The names by which browsers may know this server; `localhost` and addresses are no names."""
    if host == "127.0.0.1":
        return set()
    return {name.lower() for name in (host, socket.gethostname(), socket.getfqdn())}
