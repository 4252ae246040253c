"""A real coordinator on a real socket, in a thread of its own."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from evenstep.coordinate.client import ask
from evenstep.coordinate.events import Ending, Terms
from evenstep.coordinate.run_folder import RunFolder
from evenstep.coordinate.service import Service
from evenstep.messages import Ask
from tests.coordinate.fake import WAIT_S, FakeWorker

T = TypeVar("T")
NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"


class Hosted:
    """A coordinator that listens, and how to reach it."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop, address: str) -> None:
        self.service, self.address, self._loop = service, address, loop
        self.token = service.folder.token
        self.name, _, port = address.rpartition(":")
        self.port = int(port)
        self.workers: list[FakeWorker] = []

    def worker(self, worker: str = "", generation: int = 0, **ready_with: Any) -> FakeWorker:
        """A worker that connects; it hangs up after the coordinator, if not before."""
        self.workers.append(FakeWorker(self.address, self.token, worker, generation, **ready_with))
        return self.workers[-1]

    def ask(self, what: str, *, num_workers: int = 0, worker: str = "") -> dict[str, Any]:
        asked = Ask(proof="", what=what, num_workers=num_workers, worker=worker)
        return ask(self.name, self.port, self.token, asked)

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
    tls: ssl.SSLContext | None = None,
    at: str = "127.0.0.1",
) -> Iterator[Hosted]:
    """A coordinator in a folder, new or to go on with, until the context is left."""
    begun: Future[Hosted] = Future()
    end = asyncio.Event()

    async def run() -> None:
        try:
            folder = RunFolder.open(path) if path.exists() else RunFolder.make(path)
            service = Service(folder, terms or Terms(run=str(path)), {})
            address = await service.open(at, port, tls)
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


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate of this machine's own making, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    how = f"-x509 -days 2 -subj /CN=here -keyout {key} -out {cert}"
    _openssl(f"req {NEW_KEY} {how} -addext subjectAltName=IP:127.0.0.1")
    return cert, key


def make_signed_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate that an authority has signed, whose own is not in it, and its key."""
    authority, its_key = make_certificate(folder, f"{name}-authority")
    cert, key, request = (folder / f"{name}{end}" for end in (".pem", ".key", ".csr"))
    (names := folder / f"{name}.names").write_text("subjectAltName=IP:127.0.0.1")
    _openssl(f"req {NEW_KEY} -subj /CN=signed -keyout {key} -out {request}")
    by = f"-CA {authority} -CAkey {its_key} -set_serial 1 -days 2 -extfile {names}"
    _openssl(f"x509 -req -in {request} {by} -out {cert}")
    return cert, key


def speaking_tls(cert: Path, key: Path) -> ssl.SSLContext:
    """What a coordinator with a certificate listens with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


def _openssl(args: str) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    subprocess.run([openssl, *args.split()], check=True, capture_output=True, timeout=WAIT_S)
