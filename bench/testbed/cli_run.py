"""Fault injection into `evenstep run` itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import psutil

from bench.testbed.live_run import SCRIPT, Fault, LiveRun
from bench.testbed.source_tree import PYTHONPATH
from evenstep.cli.operators import ask_coordinator
from evenstep.coordinate.client import NoAnswerError
from evenstep.errors import ConfigError
from evenstep.processes import Liveness, ProcessIdentity

Popen = Callable[..., subprocess.Popen[Any]]
EVENSTEP = Path(sys.executable).with_name("evenstep")
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": PYTHONPATH,
    "OMP_NUM_THREADS": "1",
    "HELD_BY": str(os.getpid()),
}


class CliRun(LiveRun):
    """An `evenstep run` process. On exit, it and all workers are killed."""

    def __init__(
        self,
        folder: Path,
        *,
        workers: str = "5",
        options: Sequence[str] = (),
        args: Sequence[str] = (),
        faults: Sequence[Fault] = (),
        script: Path = SCRIPT,
        env: Mapping[str, str] = ENVIRONMENT,
        run_folder: Path | None = None,
        popen: Popen = subprocess.Popen,
    ) -> None:
        super().__init__(folder)
        if run_folder is not None:
            self.folder = run_folder
        self.command = [str(script), "--out", str(self.out), *args]
        self._options, self._popen = options, popen
        self._env = {**env, "FAULTS": json.dumps(faults)}
        self.start(workers)

    def start(self, workers: str) -> None:
        """Start `evenstep run`, on a new folder or on that of a run to resume."""
        where = ["--resume" if self.folder.exists() else "--run", str(self.folder)]
        command = [str(EVENSTEP), "run", "--workers", workers, *where, *self._options]
        with self.log.open("a") as log:
            self.process = self._popen(
                [*command, *self.command], stdout=log, stderr=subprocess.STDOUT, env=self._env
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._kill_workers()
        self.print_output_if(error)

    def _kill_workers(self) -> None:
        """Kill workers that outlived their coordinator."""
        for pid in self.launched():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)

    def launched(self) -> list[int]:
        """Pids of workers that a coordinator of this run has started and that still run."""
        found = []
        for file in self.folder.glob("logs/*.pid"):
            with suppress(OSError, msgspec.DecodeError):  # the disk fails
                found.append(msgspec.json.decode(file.read_bytes(), type=ProcessIdentity))
        return [worker.pid for worker in found if worker.liveness() is Liveness.ALIVE]

    def wait_for_exit(self, pid: int) -> None:
        """Wait for a process that is not our child."""
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait()

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        return ask_coordinator(str(self.folder), None, what, **more)

    def status(self) -> dict[str, Any]:
        try:
            return self.ask("status")
        except (NoAnswerError, ConfigError):
            return {}

    @property
    def returncode(self) -> int | None:
        return self.process.poll()
