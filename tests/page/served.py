"""A page that is served for real, and a plain client for it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstep.page.commands import AskCoordinator
from evenstep.page.site import Site
from evenstep.page.watched import Watched

WAIT_S = 600.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def cookie(self) -> str:
        """The session's cookie, as a browser sends it back."""
        return self.headers["set-cookie"].partition(";")[0]


class Client:
    """Requests with the headers of a browser that has opened the page."""

    def __init__(self, site: Site, cookie: str = "") -> None:
        self.site, self.cookie = site, cookie

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, **headers)

    def request(self, method: str, path: str, body: bytes | str = b"", **headers: str) -> Answer:
        """Header names are written with underscores; an empty one is not sent."""
        there = http.client.HTTPConnection("127.0.0.1", self.site.port, timeout=WAIT_S)
        sent = {"cookie": self.cookie} | {k.replace("_", "-"): v for k, v in headers.items()}
        try:
            given = {k: v for k, v in sent.items() if v}
            there.request(method, path, body or None, given)
            got = there.getresponse()
            found = {name.lower(): value for name, value in got.getheaders()}
            return Answer(got.status, found, got.read())
        finally:
            there.close()

    def command(self, **command: Any) -> Answer:
        """As the page's own script sends it."""
        return self.request("POST", "/commands", json.dumps(command).encode(), **self.proofs)

    @property
    def proofs(self) -> dict[str, str]:
        return {
            "content_type": "application/json",
            "origin": f"http://127.0.0.1:{self.site.port}",
            "x_evenstep_token": self.site.keys.csrf,
        }

    @contextmanager
    def events(self) -> Iterator[Iterator[tuple[str, Any]]]:
        """News, each as its topic and content."""
        with socket.create_connection(("127.0.0.1", self.site.port), WAIT_S) as there:
            head = f"GET /events HTTP/1.1\r\nhost: 127.0.0.1\r\ncookie: {self.cookie}\r\n\r\n"
            there.sendall(head.encode())
            with there.makefile("rb") as lines:
                assert b" 200 " in lines.readline()
                yield _news(lines)


def _news(lines: Any) -> Iterator[tuple[str, Any]]:
    topic = ""
    for line in lines:
        name, _, content = line.decode().strip().partition(": ")
        if name == "event":
            topic = content
        elif name == "data":
            yield topic, json.loads(content)


@contextmanager
def served(
    journal: Path, *, ask: AskCoordinator | None = None, commands: bool = False
) -> Iterator[Client]:
    """A client that has exchanged the key for a cookie."""
    watched = Watched(journal, name=journal.stem, ask=ask)
    site = Site(watched, host="127.0.0.1", port=0, commands=commands)
    thread = threading.Thread(target=lambda: asyncio.run(site.serve()), daemon=True)
    thread.start()
    try:
        stranger = Client(site)
        yield Client(site, stranger.get(f"/?key={site.keys.full}").cookie)
    finally:
        site.close()
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the server does not end"
