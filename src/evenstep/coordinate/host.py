"""The coordinator of a run, driven: its folder, its sockets, its clock."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from evenstep.config import Settings
from evenstep.coordinate.brain import Brain
from evenstep.coordinate.coordinator import Coordinator
from evenstep.coordinate.dial import EVERYWHERE, spell, way_out
from evenstep.coordinate.member import Ending, Store, Terms
from evenstep.coordinate.run import RunFolder
from evenstep.coordinate.server import Server
from evenstep.errors import InvalidInputError, PlanError
from evenstep.journal import Journal
from evenstep.messages import Answer, Ask, FromClient, Hello, Refused, ToClient, Welcome
from evenstep.types import WorkerId

log = logging.getLogger("evenstep")

TICK_S = 0.25


class Host:
    """One coordinator in one event loop. `open` it, wait for `ending`, then `close` it."""

    def __init__(self, folder: RunFolder, terms: Terms, about: dict[str, Any]) -> None:
        self.folder, self._about = folder, about
        self.server = Server(folder.token, self)
        ids = [w[1:] for w in folder.launched() if w[1:].isdecimal()]
        self.coordinator = Coordinator(
            terms, self, timer=time.thread_time, names_from=1 + max(map(int, ids), default=-1)
        )
        self._zero_s = time.monotonic()
        self._ended = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None
        if folder.journal.exists():
            self._restore()

    def _restore(self) -> None:
        folder = self.folder
        restored = Brain.restore(folder.journal, time.thread_time)
        self._zero_s -= restored.clock_s
        ended = folder.launched() - folder.outlived().keys()
        self.coordinator.restore(self.now_s, restored, stores=folder.stores(), ended=ended)

    @property
    def now_s(self) -> float:
        """The run's own clock: it goes on where it stood when the run was left."""
        return time.monotonic() - self._zero_s

    async def open(self, address: str, port: int, tls: ssl.SSLContext | None = None) -> str:
        """Listen, and say where in the run's folder."""
        told = await self.server.open(address, port, tls)
        elsewhere = ""
        if address in EVERYWHERE:  # which means this host to whoever reads it
            elsewhere = spell(way_out(address) or socket.gethostname(), told.rpartition(":")[2])
        self.folder.write_address(told, elsewhere)
        self._ticking = asyncio.create_task(self._tick())
        return told

    async def ending(self) -> Ending:
        """Wait for the end of the run."""
        await self._ended.wait()
        assert self.coordinator.ending is not None
        return self.coordinator.ending

    async def close(self) -> None:
        """Hang up and let the folder go."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])
        await self.server.close()
        self.coordinator.close()
        self.folder.close()

    def call(self, what: Callable[..., Any], *args: Any) -> Any:
        """Let the coordinator do something, now. A mistake of its own ends the run."""
        try:
            return what(self.now_s, *args)
        except InvalidInputError:
            raise
        except PlanError as e:  # of the first shares of a roster: there are none to go on with
            self.coordinator.fail(self.now_s, str(e))
        except Exception as e:
            told = traceback.format_exc()
            self.coordinator.ending = Ending(
                ok=False, why=f"the coordinator failed: {e}", told=told
            )
            raise
        finally:
            if self.coordinator.ending is not None:
                self._ended.set()

    async def _tick(self) -> None:
        while True:
            self.call(self.coordinator.tick)
            await asyncio.sleep(TICK_S)

    # For the server.

    def admit(self, hello: Hello) -> Welcome | Refused:
        answer: Welcome | Refused = self.call(self.coordinator.admit, hello)
        return answer

    def arrived(self, worker: WorkerId) -> None:
        self.call(self.coordinator.arrived, worker)

    def heard(self, worker: WorkerId, message: FromClient) -> None:
        self.call(self.coordinator.heard, worker, message)

    def closed(self, worker: WorkerId) -> None:
        self.call(self.coordinator.closed, worker)

    def ask(self, ask: Ask) -> Answer:
        answer: Answer = self.call(self.coordinator.ask, ask)
        if ask.what == "status":
            answer.told["refused"] = dict(self.server.refused)
        return answer

    # For the coordinator.

    def send(self, worker: WorkerId, message: ToClient) -> None:
        self.server.send(worker, message)

    def hang_up(self, worker: WorkerId) -> None:
        self.server.hang_up(worker)

    def journal(self, settings: Settings, about: dict[str, Any]) -> Journal | None:
        return Journal.create(self.folder.journal, settings, {**self._about, **about})

    def checkpoint(self) -> str:
        return self.folder.newest_checkpoint()

    def keep(self, stores: Mapping[WorkerId, Store]) -> None:
        try:
            self.folder.keep_stores(stores)
        except OSError as e:
            told = f"{self.folder.path / 'stores.json'}: cannot be written: {e.strerror}"
            log.error("%s; the run goes on, but nobody can take it over", told)
