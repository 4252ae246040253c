"""`evenstep run` as a user would start it, with some cores for each worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from bench.demo.cores import Cores
from bench.demo.screen import Screen
from bench.jobs import ask_run
from bench.testbed.source_tree import PYTHONPATH
from bench.turns import KEEP_MEMORY
from evenstep.coordinate.client import NoAnswerError
from evenstep.coordinate.run_folder import JOURNAL, RunFolder
from evenstep.emulate.worker_api import START, ready_mark
from evenstep.errors import ConfigError, EvenstepError
from evenstep.launch.die_with_parent import die_with_parent
from evenstep.processes import ProcessIdentity

EVENSTEP = Path(sys.executable).with_name("evenstep")
POLL_S = 0.2
STOP_S = 15.0  # for a run to stop gracefully
SILENT_S = 60.0  # without an answer, until the demo gives up
LEASE_S = 20.0  # workers end so long after a demo that was killed

Status = Mapping[str, Any]


class DemoError(EvenstepError, RuntimeError):
    """The run did not go as the demo needs it."""


class Stage:
    """A run on workers w0, w1, ... However the demo ends, the run ends with `cleanup`."""

    def __init__(
        self,
        folder: Path,
        options: Sequence[str],
        script: Sequence[str],
        levels: Sequence[float],
        screen: Screen,
        cleanup: ExitStack,
        *,
        quotas: bool,
    ) -> None:
        folder.mkdir()
        self.run, self._log, self._marks = folder / "run", folder / "output", folder / "marks"
        self._marks.mkdir()
        self._screen = screen
        names = [f"w{i}" for i in range(len(levels))]
        environment = {**os.environ, **KEEP_MEMORY, "PYTHONPATH": PYTHONPATH}
        options = ["--workers", str(len(levels)), "--lease", str(LEASE_S), *options]
        command = [str(EVENSTEP), "run", *options, "--run", str(self.run), *script]
        cleanup.callback(self._end)
        self.cores = Cores(self._marks, cleanup, quotas=quotas)
        for name in (*names, f"w{len(names)}"):
            self.cores.announce(name)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                die_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, **self.cores.environment, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C reaches only the demo
            )
        self._answered_s = time.monotonic()
        self._start(dict(zip(names, levels, strict=True)))

    def until(self, reached: Callable[[Status], bool]) -> Status:
        """Show the run until a status is as wanted, and return that."""
        while True:
            status = self._status()
            if status is not None:
                self._screen.show(status)
                if reached(status):
                    return status
            self._check(None)
            time.sleep(POLL_S)

    def step(self, number: int) -> int:
        """Show the run until it has made so many steps, and return how many it has made."""
        return int(self.until(lambda status: status["step"] + 1 >= number)["step"]) + 1

    def limit(self, worker: str, cores: float) -> int:
        """Give a worker these cores from now on. Returns how many steps were made before."""
        self.cores.limit(worker, self.pid(worker), cores)
        return self.step(0)

    def trains(self, worker: str) -> int:
        """Show the run until a worker takes part. Returns how many steps were made before."""

        def takes_part(status: Status) -> bool:
            ranks = {w["worker"]: w["rank"] for w in status["workers"]}
            return ranks.get(worker) is not None

        return int(self.until(takes_part)["step"]) + 1

    def kill(self, worker: str) -> None:
        """Kill a worker, as a power loss would."""
        os.kill(self.pid(worker), signal.SIGKILL)
        self.cores.release(worker)

    def scale(self, num_workers: int) -> None:
        """Ask for another number of workers: `evenstep scale`."""
        ask_run(self.run, "scale", num_workers=num_workers)

    def pid(self, worker: str) -> int:
        """The process of a worker, once it is started."""
        file = self.run / "logs" / f"{worker}.pid"
        self.until(lambda _: file.exists())
        return msgspec.json.decode(file.read_bytes(), type=ProcessIdentity).pid

    def finish(self) -> Path:
        """Show the run until its process has ended. Returns its journal."""
        while self._process.poll() is None:
            status = self._status()
            if status is not None and status["state"] != "ended":
                self._screen.show(status)
            time.sleep(POLL_S)
        self._screen.clear()
        if self._process.returncode != 0:
            self._check(0)
        return self.run / JOURNAL

    def _start(self, cores: Mapping[str, float]) -> None:
        """Limit the workers once all have imported and have taken a first step."""
        while not all(ready_mark(self._marks, name).exists() for name in cores):
            self._check(None)
            time.sleep(POLL_S)
        for name, own in sorted(cores.items(), key=lambda item: -item[1]):
            self.cores.limit(name, self.pid(name), own)
        (self._marks / START).touch()

    def _status(self) -> Status | None:
        try:
            status = ask_run(self.run, "status")
        except (
            NoAnswerError,
            ConfigError,
            OSError,
        ) as e:  # it does not listen yet, or not any more
            if time.monotonic() - self._answered_s > SILENT_S:
                raise DemoError(f"`evenstep run` does not answer: {e}") from None
            return None
        self._answered_s = time.monotonic()
        return status

    def _check(self, expected: int | None) -> None:
        """Raise DemoError if the run has ended unexpectedly."""
        if (code := self._process.poll()) != expected:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise DemoError(f"`evenstep run` ended with {code}, unexpectedly:\n{tail}")

    def _end(self) -> None:
        for _ in range(2):  # the second signal kills
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        with suppress(ConfigError):
            folder = RunFolder.open(self.run)
            for pid in folder.outlived().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            folder.close()
