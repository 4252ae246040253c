"""A launcher: detached processes on this host, remembered in the run's folder.

An engine of your own needs no more than this: commands that start, stop and list workers. They may
take long or fail; see docs/how-to/launchers.md.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from evenstep.errors import ConfigError
from evenstep.ports import EngineJob, Observed, Stage
from evenstep.processes import Liveness, ProcessIdentity


class Detached:
    """One `evenstep.launch.worker` for each worker, and a file with its pid."""

    def __init__(self, job: EngineJob) -> None:
        if job.options:
            raise ConfigError("--on detached", f"takes no --{min(job.options)}")
        self._job = job
        self._pids = job.folder / "pids"
        self._pids.mkdir(exist_ok=True)
        self._own: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, kind: str, workers: Sequence[str]) -> None:
        """Each writes its own log; the token is in a file that EVENSTEP_TOKEN_FILE names."""
        command = [sys.executable, "-m", "evenstep.launch.worker", *self._job.command]
        of_kind = self._job.kinds[kind].variables()
        for worker in workers:
            with (self._job.folder / "logs" / f"{worker}.log").open("ab") as log:
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **self._job.env, **of_kind, "EVENSTEP_WORKER": worker},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._own[worker] = process
            identity = ProcessIdentity.of(process.pid)  # a pid alone may be reused
            (self._pids / worker).write_bytes(msgspec.json.encode(identity))

    def stop(self, workers: Sequence[str]) -> None:
        """SIGTERM now; the run asks again for what has not ended, and then SIGKILL follows."""
        for worker in workers:
            asked = self._pids / f".{worker}.asked"
            number = signal.SIGKILL if asked.exists() else signal.SIGTERM
            with suppress(FileNotFoundError, ProcessLookupError):
                if (process := self._identity(worker)).liveness() is Liveness.ALIVE:
                    os.kill(process.pid, number)
                    asked.touch()

    def observe(self) -> Mapping[str, Observed]:
        """Processes of this launcher, and those that an earlier one has left."""
        shown = {path.name: self._look(path.name) for path in self._pids.glob("[!.]*")}
        return {worker: seen for worker, seen in shown.items() if seen is not None}

    def close(self) -> None:
        """Processes run on."""

    def _look(self, worker: str) -> Observed | None:
        if worker in self._own:
            code = self._own[worker].poll()
            stage = Stage.RUNNING if code is None else Stage.ENDED
            return Observed(stage=stage, exit_code=code)
        if self._identity(worker).liveness() is Liveness.ALIVE:
            return Observed(stage=Stage.RUNNING)
        return None  # it was an earlier launcher's, and has ended: nobody knows how

    def _identity(self, worker: str) -> ProcessIdentity:
        return msgspec.json.decode((self._pids / worker).read_bytes(), type=ProcessIdentity)
