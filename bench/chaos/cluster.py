"""The run that faults are injected into: `evenstep run`, and workers that join from other hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.testbed.cli_run import ENVIRONMENT, EVENSTEP, CliRun
from bench.testbed.disk import Disk
from bench.testbed.fork_server import fork_server
from bench.testbed.hosts import Hosts
from bench.testbed.live_run import HELD, POLL_S, SCRIPT
from evenstep.coordinate.client import NoAnswerError
from evenstep.launch.die_with_parent import die_with_parent
from evenstep.processes import Liveness, ProcessIdentity

WARM_START = SCRIPT.with_name("warm_start.py")
LEASE_S = 15.0  # a takeover waits so long for joiners that were killed elsewhere
BOUND_S = 300.0  # without a step: the run hangs
OPTIONS = ["--restarts", "100000", "--checkpoint-every", "1", "--keep", "4"]


class HangError(Exception):
    """The run does not train, or does not end, within BOUND_S."""


class CrashError(Exception):
    """The run ended, and nobody asked for it."""


class ChaosRun(CliRun):
    """A held run that is restarted at will. With `hosts`, one worker joins from each but the first.

    `size`: how many workers it is to have here.
    """

    def __init__(self, folder: Path, size: int, disk: Disk | None, hosts: Hosts | None) -> None:
        self.size, self.disk, self.hosts = size, disk, hosts
        self.ledger = folder / "ledger"
        self._joined: dict[int, subprocess.Popen[Any]] = {}  # by host
        self._ranked: list[ProcessIdentity] = []  # the roster, as last seen
        address = ["--host", hosts[0].address] if hosts else []
        start = hosts[0].popen if hosts else subprocess.Popen
        super().__init__(
            folder,
            workers=str(size),
            options=[*OPTIONS, "--lease", str(LEASE_S), *address],
            args=HELD,
            script=WARM_START,
            env={**ENVIRONMENT, "FORK_SERVER": fork_server().path, "LEDGER": str(self.ledger)},
            run_folder=disk.path / "run" if disk else None,
            popen=lambda command, **options: start(die_with_parent(command), **options),
        )

    def restart(self) -> None:
        """Resume the run with a new coordinator."""
        self.start(str(self.size))

    def kill_coordinator(self) -> None:
        self.process.kill()
        self.process.wait()

    def await_status(
        self, holds: Callable[[dict[str, Any]], bool], what: str, bound_s: float = BOUND_S
    ) -> dict[str, Any]:
        """Wait until the status satisfies a condition. Raises HangError or CrashError."""
        deadline_s = time.monotonic() + bound_s
        while True:
            status = self.status()
            if status and holds(status):
                return status
            if (code := self.returncode) is not None:
                raise CrashError(f"`evenstep run` ended with {code}")
            if time.monotonic() > deadline_s:
                found = {k: status.get(k) for k in ("state", "reason", "generation", "step")}
                raise HangError(f"waited {bound_s:g} s for {what}: {found}")
            time.sleep(POLL_S)

    def settle(self, steps: int) -> dict[str, Any]:
        """Bring the run back to its size and wait until it has trained so many steps."""
        self.fill_up()
        return self.train(steps)

    def train(self, steps: int) -> dict[str, Any]:
        """Wait until the run has trained so many steps."""
        begun = -1

        def has_trained(status: dict[str, Any]) -> bool:
            nonlocal begun
            if status["state"] != "training" or status["step"] < begun:
                begun = -1  # everybody was lost: an older checkpoint
            elif begun < 0:
                begun = status["step"]
            return begun >= 0 and status["step"] >= begun + steps

        return self.await_status(has_trained, f"{steps} steps")

    def fill_up(self) -> None:
        """Ask for workers that are missing: those left out, drained, or evicted elsewhere."""
        for i in range(1, len(self.hosts or ())):
            if i not in self._joined or self._joined[i].poll() is not None:
                self._join(i)
        if self.hosts is None:
            self.request("scale", num_workers=self.size)

    def rejoin(self, host: int) -> None:
        """Kill the worker on another host, and start one in its place."""
        self._joined[host].kill()
        self._joined[host].wait()
        self._join(host)

    def _join(self, host: int) -> None:
        assert self.hosts is not None
        command = [str(EVENSTEP), "join", str(self.folder), *self.command]
        with self.log.open("a") as log:
            self._joined[host] = self.hosts[host].popen(
                die_with_parent(command), stdout=log, stderr=subprocess.STDOUT, env=self._env
            )

    def request(self, what: str, **more: Any) -> bool:
        """An operator's request. False: the run refuses it, or has no coordinator."""
        with suppress(NoAnswerError, FileNotFoundError, ValueError):
            self.ask(what, **more)
            return True
        return False

    def status(self) -> dict[str, Any]:
        status = super().status()
        rows = [w for w in status.get("workers", ()) if w["rank"] is not None and w["pid"]]
        if rows:
            self._ranked = []
            for row in sorted(rows, key=lambda w: w["rank"]):
                with suppress(OSError):  # it has just ended
                    self._ranked.append(ProcessIdentity.of(row["pid"]))
        return status

    def roster(self) -> list[int]:
        """Pids of the workers in rank order, as last known while no coordinator answers.

        Waits until one of them is alive.
        """
        self.status()
        while not (alive := [p.pid for p in self._ranked if p.liveness() is Liveness.ALIVE]):
            self.await_status(lambda status: bool(self._ranked), "a roster")
        return alive

    def connected(self) -> list[int]:
        """Pids of the workers that are connected to the coordinator."""
        return [w["pid"] for w in self.status().get("workers", ()) if w["pid"]]

    def everybody(self) -> list[int]:
        """Pids of all workers, whether the coordinator knows them or not."""
        joined = [p.pid for p in self._joined.values() if p.poll() is None]
        return [*self.connected(), *self.launched(), *joined]

    def saves_checkpoint(self) -> bool:
        """Whether a worker writes one now; a worker that was killed leaves its `part` behind."""
        parts = (self.folder / "checkpoints").glob("step-*.*.part")
        return any(Path("/proc", part.suffixes[-2][1:]).exists() for part in parts)

    def finish(self) -> int:
        """Train to the end of the epoch. Raises HangError."""
        self.go()
        deadline_s = time.monotonic() + BOUND_S
        others = list(self._joined.values())
        while (code := self.returncode) is None or any(p.poll() is None for p in others):
            if time.monotonic() > deadline_s:
                raise HangError(f"the run has not ended after {BOUND_S:g} s")
            if code is not None:  # a joiner that comes now would wait two minutes for a coordinator
                send([p.pid for p in others if p.poll() is None], signal.SIGTERM)
            time.sleep(POLL_S)
        return code


def send(pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
