"""Fault injection: a real coordinator in this process, with workers from the fork server.

Workers are real processes that can be killed or stopped, and they start in milliseconds. Tests of
`evenstep run` itself use `cli_run.CliRun`, which has the same interface.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.testbed.fork_server import Forked, fork_server
from bench.testbed.live_run import SCRIPT, Fault, LiveRun

from evenstep.coordinate.events import Exited, StartAsked, Terms
from evenstep.types import WorkerId
from tests.coordinate.hosted import Hosted, hosted

# On a busy machine a worker may be silent for a while; a test that needs evictions sets its own.
LONG_TIMEOUTS = {"silence_s": 120.0, "patience_s": 600.0, "gather_s": 600.0}


class Cluster(LiveRun):
    """A run in a folder. On exit, all workers are killed."""

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 6,
        args: Sequence[str] = (),
        faults: Sequence[Fault] = (),
        script: Path = SCRIPT,
        preload: Sequence[str] = (),
        **terms: Any,
    ) -> None:
        super().__init__(folder)
        self._num, self._preload = workers, preload
        self._argv: list[str | Path] = [script, "--out", self.out, *args]
        self._env = {"FAULTS": json.dumps(faults), "HELD_BY": str(os.getpid())}
        self._terms = Terms(run=str(self.folder), **{"restarts": 0, **LONG_TIMEOUTS, **terms})
        self._stack = ExitStack()
        self._workers: dict[WorkerId, Forked] = {}
        self._host: Hosted

    def __enter__(self) -> Cluster:
        self._stack.callback(self._kill_all)
        self._coordinate()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        self.print_output_if(error)

    def _coordinate(self, port: int = 0) -> None:
        self._host = self._stack.enter_context(hosted(self.folder, self._terms, port))
        service = self._host.service
        service.coordinator.launcher = self
        start = StartAsked(num_workers=self._num, explicit=True)
        self._host.inside(lambda: service.handle(start))

    # Launcher interface, called in the coordinator's thread.

    def start(self, kind: str, workers: Sequence[WorkerId]) -> None:
        for worker in workers:
            env = {
                **self._env,
                "EVENSTEP_COORDINATOR": self._host.address,
                "EVENSTEP_TOKEN": self._host.token,
                "EVENSTEP_WORKER": worker,
            }
            self._workers[worker] = fork_server(*self._preload).run(self._argv, env, self.log)
            asyncio.get_running_loop().add_reader(self._workers[worker], self._ended, worker)

    def stop(self, workers: Sequence[WorkerId]) -> None:
        for worker in workers:
            os.kill(self._workers[worker].pid, signal.SIGKILL)

    def _ended(self, worker: WorkerId) -> None:
        forked = self._workers[worker]
        asyncio.get_running_loop().remove_reader(forked)
        self._host.service.handle(Exited(worker=worker, code=forked.wait()))

    # LiveRun interface.

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        return self._host.ask(what, **more)

    def status(self) -> dict[str, Any]:
        return self._host.inside(self._host.service.status)

    @property
    def returncode(self) -> int | None:
        """The exit code that `evenstep run` would return; None while the run is alive."""
        ending = self._host.service.state.ending
        if ending is None or any(worker.returncode is None for worker in self._workers.values()):
            return None
        return 0 if ending.ok else 1

    def _kill_all(self) -> None:
        for worker in self._workers.values():
            if worker.returncode is None:
                with suppress(ProcessLookupError):  # its end is not noticed yet
                    os.kill(worker.pid, signal.SIGKILL)
                worker.wait()
