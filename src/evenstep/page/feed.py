"""News of a run for browsers: server-sent events.

The run is looked at only while somebody watches, once for all of them. A viewer that reads slowly
misses news that newer news replaces; nothing is queued for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec

log = logging.getLogger("evenstep")

MAX_VIEWERS = 24
STATUS_S = 1.0
GROWN_S = 2.0
IDLE_S = 15.0
"""Without news, a comment after this many seconds: both ends notice a connection that broke."""

Look = Callable[[], Mapping[str, Any]]


class TooManyViewersError(Exception):
    """The feed has no room for another browser."""


class Feed:
    """Looks at several topics of a run, and tells viewers what changed.

    `topics`: what to look at, in a thread of its own, and the seconds between two looks.
    """

    def __init__(self, topics: Mapping[str, tuple[Look, float]]) -> None:
        self._topics = topics
        self._news: dict[str, tuple[int, bytes]] = {}  # by topic: number and content of the newest
        self._changed = asyncio.Event()
        self._looking: list[asyncio.Task[None]] = []
        self._looks: dict[str, asyncio.Task[Mapping[str, Any]]] = {}  # by topic: the newest
        self._num_viewers = 0
        self._closed = False

    @property
    def num_viewers(self) -> int:
        """Browsers that are connected now."""
        return self._num_viewers

    def close(self) -> None:
        """Let all viewers go: the server stops."""
        self._closed = True
        self._wake()

    def enter(self) -> None:
        """Make room for a viewer, who must `leave`; TooManyViewersError if there is none."""
        if self._num_viewers >= MAX_VIEWERS:
            raise TooManyViewersError
        self._num_viewers += 1
        if self._num_viewers == 1:
            self._looking = [
                asyncio.create_task(self._look_at(topic, look, every_s))
                for topic, (look, every_s) in self._topics.items()
            ]

    def leave(self) -> None:
        """A viewer is gone."""
        self._num_viewers -= 1
        if not self._num_viewers:
            for task in self._looking:
                task.cancel()
            self._looking.clear()
            self._news.clear()  # it would be stale for the next viewer

    async def events(self) -> AsyncGenerator[bytes, None]:
        """What to send to a viewer: at first what is known, then what changes."""
        seen: dict[str, int] = {}
        yield b"retry: 2000\n\n"
        while not self._closed:
            changed = self._changed
            for topic, (number, content) in list(self._news.items()):
                if seen.get(topic) != number:
                    seen[topic] = number
                    yield b"event: %b\ndata: %b\n\n" % (topic.encode(), content)
            try:
                await asyncio.wait_for(changed.wait(), IDLE_S)
            except TimeoutError:
                yield b": still here\n\n"

    async def _look_at(self, topic: str, look: Look, every_s: float) -> None:
        number = 0
        while True:
            try:
                content = msgspec.json.encode(await self._looked(topic, look))
            except Exception as e:  # the others are still worth watching
                log.exception("%s of the run cannot be shown", topic)
                content = msgspec.json.encode({"problem": f"{type(e).__name__}: {e}"})
            if content != self._news.get(topic, (0, b""))[1]:
                number += 1
                self._news[topic] = (number, content)
                self._wake()
            await asyncio.sleep(every_s)

    async def _looked(self, topic: str, look: Look) -> Mapping[str, Any]:
        """Result of a look, shared: a journal may take long to read, and if each reload of a page
        started another look, they would take up all threads."""
        newest = self._looks.get(topic)
        if newest is None or newest.done():
            newest = self._looks[topic] = asyncio.create_task(asyncio.to_thread(look))
        return await asyncio.shield(newest)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
