"""The contract of launchers, on the engines that this machine has."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from evenstep.launch.local import LocalLauncher, worker_environment
from evenstep.ports import EngineJob, Observed
from evenstep.testing import LauncherContract
from evenstep.types import WorkerId

T = TypeVar("T")


class LocalInLoop:
    """A local launcher in the event loop that it needs, called from elsewhere."""

    def __init__(self, job: EngineJob) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        env = worker_environment(
            {**os.environ, **job.env},
            coordinator=job.env["EVENSTEP_COORDINATOR"],
            token_file=job.folder / "token",
        )
        self._local = self._call(
            lambda: LocalLauncher(
                [sys.executable, *job.command],
                env=env,
                logs=job.folder / "logs",
                on_dying=lambda worker, number: None,
                on_end=lambda worker, code, output: None,
                out=io.StringIO(),
            )
        )

    def start(self, kind: str, workers: Sequence[WorkerId]) -> None:
        self._call(lambda: self._local.start(kind, workers))

    def stop(self, workers: Sequence[WorkerId]) -> None:
        self._call(lambda: self._local.stop(workers))

    def observe(self) -> Mapping[WorkerId, Observed]:
        return self._call(self._local.observe)

    def close(self) -> None:
        self._call(self._local.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, what: Callable[[], T]) -> T:
        done: Future[T] = Future()

        def call() -> None:
            try:
                done.set_result(what())
            except BaseException as e:
                done.set_exception(e)

        self._loop.call_soon_threadsafe(call)
        return done.result()


class TestLocal(LauncherContract):
    remembers = False  # it finds them by their pids, in the run's folder

    def made(self, job: EngineJob) -> LocalInLoop:
        return LocalInLoop(job)
