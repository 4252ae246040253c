"""A real coordinator on a real socket, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from evenstep.coordinate.client import ask
from evenstep.coordinate.events import Ending, Terms
from evenstep.coordinate.run_folder import TLS, RunFolder
from evenstep.coordinate.service import Service
from evenstep.coordinate.tls import make_certificate, pem_fingerprint, server_context
from evenstep.messages import Ask
from tests.coordinate.fake import WAIT_S, FakeWorker

T = TypeVar("T")


class Hosted:
    """A coordinator that listens, and how to reach it."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop, address: str) -> None:
        self.service, self.address, self._loop = service, address, loop
        self.token, self.fingerprint = service.folder.token, service.folder.fingerprint
        self.name, _, port = address.rpartition(":")
        self.port = int(port)
        self.workers: list[FakeWorker] = []

    def worker(self, worker: str = "", generation: int = 0, **ready_with: Any) -> FakeWorker:
        """A worker that connects; it hangs up after the coordinator, if not before."""
        known = {"fingerprint": self.fingerprint, **ready_with}
        self.workers.append(FakeWorker(self.address, self.token, worker, generation, **known))
        return self.workers[-1]

    def ask(self, what: str, *, num_workers: int = 0, worker: str = "") -> dict[str, Any]:
        asked = Ask(proof="", what=what, num_workers=num_workers, worker=worker)
        return ask(self.name, self.port, self.token, asked, self.fingerprint)

    def ending(self) -> Ending:
        """How the run ended, once it has."""
        return asyncio.run_coroutine_threadsafe(self.service.ending(), self._loop).result(WAIT_S)

    def inside(self, what: Callable[[], T]) -> T:
        """Call something in the coordinator's own thread."""
        done: Future[T] = Future()

        def call() -> None:
            try:
                done.set_result(what())
            except BaseException as e:
                done.set_exception(e)

        self._loop.call_soon_threadsafe(call)
        return done.result(WAIT_S)


@contextmanager
def hosted(
    path: Path,
    terms: Terms | None = None,
    port: int = 0,
    at: str = "127.0.0.1",
    *,
    tls: bool = False,
) -> Iterator[Hosted]:
    """A coordinator in a folder, new or to go on with, until the context is left.

    `tls`: a new run gets a certificate.
    """
    begun: Future[Hosted] = Future()
    end = asyncio.Event()

    async def run() -> None:
        try:
            folder = RunFolder.open(path) if path.exists() else make_folder(path, tls)
            service = Service(folder, terms or Terms(run=str(path)), {})
            context = server_context(folder.path / TLS) if folder.fingerprint else None
            address = await service.open(at, port, context)
        except BaseException as e:
            begun.set_exception(e)
            return
        loop = asyncio.get_running_loop()
        begun.set_result(Hosted(service, loop, address))
        try:
            await end.wait()
        finally:
            await service.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    there = begun.result(WAIT_S)
    try:
        yield there
    finally:
        there.inside(end.set)
        thread.join(WAIT_S)
        for worker in there.workers:
            worker.close()
        assert not thread.is_alive()


def make_folder(path: Path, tls: bool) -> RunFolder:
    """The folder of a new run, as `evenstep run` and `evenstep run --tls` make it."""
    if not tls:
        return RunFolder.make(path)
    pem = make_certificate()
    return RunFolder.make(path, pem_fingerprint(path / TLS, pem), pem)
