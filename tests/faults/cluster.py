"""A run to do harm to: a real coordinator in this process, workers from the fork server.

Workers are real processes that can be killed and stopped; they start in milliseconds. What only
`evenstep run` itself does is tested with `running.Running`, which has the same face.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from evenstep.coordinate.events import Exited, StartAsked, Terms
from evenstep.types import Launch, WorkerId
from tests.coordinate.hosted import Hosted, hosted
from tests.faults.watching import SCRIPT, Fault, Watching
from tests.fork_server import Forked, fork_server

# Not under test unless a test says so: on a busy machine a worker may be silent for a while.
PATIENT = {"silence_s": 120.0, "patience_s": 600.0, "gather_s": 600.0}


class Cluster(Watching):
    """A run in a folder. It ends with all its workers when the context is left."""

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 6,
        args: Sequence[str] = (),
        faults: Sequence[Fault] = (),
        script: Path = SCRIPT,
        **terms: Any,
    ) -> None:
        super().__init__(folder)
        self._num = workers
        self._argv: list[str | Path] = [script, "--out", self.out, *args]
        self._env = {"FAULTS": json.dumps(faults), "HELD_BY": str(os.getpid())}
        self._terms = Terms(run=str(self.folder), **{"restarts": 0, **PATIENT, **terms})
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
        self.show_if(error)

    def _coordinate(self, port: int = 0) -> None:
        self._host = self._stack.enter_context(hosted(self.folder, self._terms, port))
        service = self._host.service
        service.coordinator.launcher = self
        start = StartAsked(num_workers=self._num, explicit=True)
        self._host.inside(lambda: service.handle(start))

    # The launcher, in the coordinator's thread.

    def launch(self, order: Launch) -> None:
        """Fork workers."""
        for _ in range(order.num_workers):
            worker = self._host.service.coordinator.launching
            env = {
                **self._env,
                "EVENSTEP_COORDINATOR": self._host.address,
                "EVENSTEP_TOKEN": self._host.token,
                "EVENSTEP_WORKER": worker,
            }
            self._workers[worker] = fork_server().run(self._argv, env, self.log)
            asyncio.get_running_loop().add_reader(self._workers[worker], self._ended, worker)

    def stop(self, worker: WorkerId) -> None:
        """End a worker that is not wanted any more."""
        os.kill(self._workers[worker].pid, signal.SIGKILL)

    def _ended(self, worker: WorkerId) -> None:
        forked = self._workers[worker]
        asyncio.get_running_loop().remove_reader(forked)
        self._host.service.handle(Exited(worker=worker, code=forked.wait()))

    # The face of a run.

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """What the coordinator answers."""
        return self._host.ask(what, **more)

    def status(self) -> dict[str, Any]:
        """The run as its coordinator sees it."""
        return self._host.inside(self._host.service.status)

    @property
    def returncode(self) -> int | None:
        """As `evenstep run` would end with; None: it goes on."""
        ending = self._host.service.state.ending
        if ending is None or any(worker.returncode is None for worker in self._workers.values()):
            return None
        return 0 if ending.ok else 1

    def _kill_all(self) -> None:
        for worker in self._workers.values():
            if worker.returncode is None:
                os.kill(worker.pid, signal.SIGKILL)
                worker.wait()
