"""Workers as processes of this machine, their output kept. They outlive a coordinator that dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil

from evenstep.launch.cards import Cards
from evenstep.launch.echo import Echo
from evenstep.types import Launch, WorkerId

_TETHER = Path(__file__).parents[1] / "emulate" / "tether.py"
GRACE_S = 5.0  # between asking a process to end and ending it
LOOK_S = 0.1  # between two looks at whether a process is being ended: each wakes this one up
EXITING = 0x4  # of the flags in /proc/PID/stat
LAST_BYTES = 8192  # of a log: enough for a traceback


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[bytes] | None  # None: started by a coordinator before this one
    pidfd: int
    stat: int  # its /proc/PID/stat, open: a number that passes to others is not mistaken for it
    log: Path

    @classmethod
    def of(cls, process: subprocess.Popen[bytes] | None, pid: int, log: Path) -> _Running:
        """ProcessLookupError or FileNotFoundError: it has just ended."""
        pidfd = os.pidfd_open(pid)
        try:
            return cls(process, pidfd, os.open(f"/proc/{pid}/stat", os.O_RDONLY), log)
        except BaseException:
            os.close(pidfd)
            raise

    def dying_by(self) -> int:
        """The signal that ends it, while there is still something of it left; else 0."""
        with suppress(ProcessLookupError):
            fields = os.pread(self.stat, 4096, 0).rpartition(b")")[2].split()
            flags, code = int(fields[6]), int(fields[-1])
            return code & 0x7F if flags & EXITING else 0
        return 0

    def close(self) -> None:
        os.close(self.pidfd)
        os.close(self.stat)

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def end_all(self) -> None:
        """End it with whatever it started."""
        if self.process is None:
            self.signal(signal.SIGKILL)  # its group's number may have passed to others
        elif self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class LocalLauncher:
    """Starts a command as often as it is told to.

    `on_end` hears of each end at once: the worker, its exit code (negative: a signal) and the end
    of its log. `on_dying` hears first of one that a signal ends, with its number: a large process
    takes a while to end, and its connections are open until then. Workers are not tied to this
    process: training goes on if it is killed, and `<worker>.pid` beside the log tells who comes
    after whether they still run.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        logs: Path,
        name: Callable[[], WorkerId],
        on_dying: Callable[[WorkerId, int], None],
        on_end: Callable[[WorkerId, int, str], None],
        out: TextIO,
    ) -> None:
        self._command, self._env, self._logs = list(command), dict(env), logs
        self._name, self._on_dying, self._on_end = name, on_dying, on_end
        self._cards = Cards.of(env)
        self._echo = Echo(out)
        self._running: dict[WorkerId, _Running] = {}
        self._dying: set[WorkerId] = set()  # of those
        self._looking: asyncio.TimerHandle | None = None
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    def launch(self, order: Launch) -> None:
        """Start workers. OSError: this machine cannot."""
        for _ in range(order.num_workers):
            self._start(self._name())

    def adopt(self, worker: WorkerId, pid: int) -> None:
        """Look after a worker that outlived the coordinator that started it."""
        path = self._logs / f"{worker}.log"
        # It may have just ended, and nobody counts on it yet.
        with suppress(ProcessLookupError, FileNotFoundError):
            self._watch(worker, _Running.of(None, pid, path))
            self._echo.follow(worker, path)
        with suppress(psutil.Error):
            self._cards.hold(worker, psutil.Process(pid).environ())

    def stop(self, worker: WorkerId) -> None:
        """Ask a worker to end; end it if it does not."""
        if running := self._running.get(worker):
            running.signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(GRACE_S, self.kill, worker)

    def kill(self, worker: WorkerId) -> None:
        """End a worker and all that it started."""
        if running := self._running.get(worker):
            running.end_all()

    @property
    def running(self) -> set[WorkerId]:
        """Workers whose processes have not ended."""
        return set(self._running)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Until all workers have ended. False: the time was up."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._all_ended.wait(), timeout_s)
        return not self._running

    async def close(self, grace_s: float = 0.0) -> None:
        """End whoever still runs, after a last while to end by themselves."""
        if grace_s > 0 and not await self.wait(grace_s):
            for worker in list(self._running):
                self.stop(worker)
            await self.wait(GRACE_S)
        for worker in list(self._running):
            self.kill(worker)
        await self.wait(GRACE_S)
        self._echo.close()

    def _start(self, worker: WorkerId) -> None:
        path = self._logs / f"{worker}.log"
        with path.open("ab") as log:
            self._echo.follow(worker, path)
            try:
                process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**self._env, **self._cards.take(worker), "EVENSTEP_WORKER": worker},
                    start_new_session=True,  # Ctrl-C is for the coordinator: it ends them in order
                )
                running = _introduced(process, path)
            except BaseException:
                self._cards.give_back(worker)
                self._echo.unfollow(worker)
                raise
        self._watch(worker, running)

    def _watch(self, worker: WorkerId, running: _Running) -> None:
        self._running[worker] = running
        self._all_ended.clear()
        asyncio.get_running_loop().add_reader(running.pidfd, self._ended, worker)
        if self._looking is None:
            self._look()

    def _look(self) -> None:
        for worker, running in list(self._running.items()):
            if worker not in self._dying and (number := running.dying_by()):
                self._dying.add(worker)
                self._on_dying(worker, number)
        # The more there are, the less often: it is half a percent of a core at the most.
        after_s = LOOK_S * max(1.0, len(self._running) / 16)
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(after_s, self._look) if self._running else None

    def _ended(self, worker: WorkerId) -> None:
        running = self._running.pop(worker)
        asyncio.get_running_loop().remove_reader(running.pidfd)
        running.end_all()  # not reaped yet, so the number of its group is still its own
        # Only a parent learns the exit code. A script that failed has said so itself.
        code = running.process.wait() if running.process else os.EX_TEMPFAIL
        running.close()
        self._dying.discard(worker)
        self._cards.give_back(worker)
        self._echo.unfollow(worker)
        if not self._running:
            self._all_ended.set()
        self._on_end(worker, code, _end_of(running.log))


def tethered(command: Sequence[str]) -> list[str]:
    """A command that does not outlive the thread that starts it."""
    return [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), *command]


def worker_environment(
    environment: Mapping[str, str],
    *,
    coordinator: str,
    token_file: Path | None = None,
    address: str = "",
    tls_ca: str = "",
    num_workers: int = 1,
) -> dict[str, str]:
    """The environment of a worker process; what the user has set for workers stays."""
    cores = len(os.sched_getaffinity(0))
    own = {
        "OMP_NUM_THREADS": str(max(1, cores // max(1, num_workers))),
        "PYTHONUNBUFFERED": "1",  # or nobody sees what it prints until much later
        **({"EVENSTEP_ADDRESS": address} if address else {}),
        **({"EVENSTEP_TLS_CA": tls_ca} if tls_ca else {}),
    }
    # A token of another run must not go before this one's.
    kept = {k: v for k, v in environment.items() if k != "EVENSTEP_TOKEN"}
    token = {"EVENSTEP_TOKEN_FILE": str(token_file)} if token_file else {}
    return {**own, **kept, "EVENSTEP_COORDINATOR": coordinator, **token}


def _introduced(process: subprocess.Popen[bytes], log: Path) -> _Running:
    """What its end is noticed by, once whoever comes after can find it. Else it is ended."""
    try:
        made_s = psutil.Process(process.pid).create_time()
        log.with_suffix(".pid").write_text(f"{process.pid} {made_s}")
        return _Running.of(process, process.pid, log)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def _end_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
