"""Launches workers as processes of this machine. They outlive a coordinator that dies.

This launcher needs no `remote`: its calls return at once, and it notices ends without polling.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import msgspec
import psutil

from evenstep.launch.console import ConsoleOutput
from evenstep.launch.gpus import GpuPool
from evenstep.launch.output import WorkerOutput
from evenstep.lines import DISK_ERRORS
from evenstep.ports import Observed, Stage
from evenstep.processes import ProcessIdentity
from evenstep.types import WorkerId

log = logging.getLogger("evenstep")

GRACE_S = 5.0  # between SIGTERM and SIGKILL
POLL_S = 0.1  # between two checks for dying processes
DRAIN_S = 5.0  # for the end of a worker's output, which a detached process may hold open
DRAIN_POLL_S = 0.005
TAIL_BYTES = 8192  # of a log: enough for a traceback
EXITING = 0x4  # flag in /proc/PID/stat


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """A running worker: how to notice its end, and how to end it."""

    process: subprocess.Popen[bytes] | None  # None: started by an earlier coordinator
    pidfd: int
    stat: int  # its /proc/PID/stat, kept open in case the pid is reused
    log: Path
    output: WorkerOutput | None = None  # None: likewise

    @classmethod
    def open(
        cls,
        process: subprocess.Popen[bytes] | None,
        pid: int,
        log: Path,
        output: WorkerOutput | None = None,
    ) -> LocalProcess:
        """Raises ProcessLookupError or FileNotFoundError if the process has just ended."""
        pidfd = os.pidfd_open(pid)
        try:
            return cls(process, pidfd, os.open(f"/proc/{pid}/stat", os.O_RDONLY), log, output)
        except BaseException:
            os.close(pidfd)
            raise

    def killed_by(self) -> int:
        """The signal that is killing the process, until it is gone; otherwise 0."""
        with suppress(ProcessLookupError):
            fields = os.pread(self.stat, 4096, 0).rpartition(b")")[2].split()
            flags, code = int(fields[6]), int(fields[-1])
            return code & 0x7F if flags & EXITING else 0
        return 0

    def close(self) -> None:
        os.close(self.pidfd)
        os.close(self.stat)
        if self.output is not None:
            self.output.close()

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """Kill the process and its descendants."""
        if self.process is None:
            self.signal(signal.SIGKILL)  # its process group id may have been reused
        elif self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def register_process(
    process: subprocess.Popen[bytes], log: Path, output: WorkerOutput
) -> LocalProcess:
    """Write the pid file for the next coordinator, and watch the process; kill it on failure."""
    try:
        write_pid_file(process.pid, log.with_suffix(".pid"))
        return LocalProcess.open(process, process.pid, log, output)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def write_pid_file(pid: int, path: Path) -> bool:
    """Write which process a pid means. False: the disk is full, fails or is read-only."""
    part = path.with_suffix(".pid.part")  # a half-written one would tell of another process
    try:
        part.write_bytes(msgspec.json.encode(ProcessIdentity.of(pid)))
        part.rename(path)
    except OSError as e:
        if e.errno not in DISK_ERRORS:
            raise
        return False
    return True


class LocalLauncher:
    """Starts one process of a command per worker.

    `on_end` is called as soon as a process ends, with the worker, its exit code (negative: a
    signal) and the end of its log. If a signal kills a process, `on_dying` is called first, with
    the worker and the signal: a large process takes a while to end and keeps its connections open
    until then. Workers outlive this process, so training goes on if it is killed; `<worker>.pid`
    next to the log tells the next coordinator whether they still run.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        logs: Path,
        on_dying: Callable[[WorkerId, int], None],
        on_end: Callable[[WorkerId, int, str], None],
        out: TextIO,
    ) -> None:
        self._command, self._env, self._logs = list(command), dict(env), logs
        self._on_dying, self._on_end = on_dying, on_end
        self._gpus = GpuPool.find(env)
        self.console = ConsoleOutput(out)
        self._running: dict[WorkerId, LocalProcess] = {}
        self._ended_workers: dict[WorkerId, Observed] = {}
        self._dying: set[WorkerId] = set()  # already reported to `on_dying`
        self._poll_timer: asyncio.TimerHandle | None = None
        self._problem = ""  # with files of workers, as last logged
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    def start(self, kind: str, workers: Sequence[WorkerId]) -> None:
        """Start workers, all of this machine's kind. Raises OSError if this machine cannot."""
        for worker in workers:
            self._start(worker)

    def observe(self) -> dict[WorkerId, Observed]:
        """The workers that were started or adopted here."""
        running = dict.fromkeys(self._running, Observed(stage=Stage.RUNNING))
        return {**self._ended_workers, **running}

    def adopt(self, worker: WorkerId, pid: int) -> None:
        """Watch a worker that outlived the coordinator that started it."""
        path = self._logs / f"{worker}.log"
        # It may have just ended; the coordinator does not count on it yet.
        with suppress(ProcessLookupError, FileNotFoundError):
            self._watch(worker, LocalProcess.open(None, pid, path))
            self.console.follow(worker, path)
        with suppress(psutil.Error):
            self._gpus.adopt(worker, psutil.Process(pid).environ())

    def stop(self, workers: Sequence[WorkerId]) -> None:
        """Send workers SIGTERM, and SIGKILL if they do not end."""
        for worker in workers:
            if running := self._running.get(worker):
                running.signal(signal.SIGTERM)
                asyncio.get_running_loop().call_later(GRACE_S, self.kill, worker)

    def kill(self, worker: WorkerId) -> None:
        """Kill a worker and its descendants."""
        if running := self._running.get(worker):
            running.kill()

    @property
    def running(self) -> set[WorkerId]:
        """Workers whose processes have not ended."""
        return set(self._running)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all workers have ended. False: timeout."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._all_ended.wait(), timeout_s)
        return not self._running

    def close(self) -> None:
        """Print the rest of the output. Workers run on: see `end_all`."""
        self.console.close()

    async def end_all(self, grace_s: float = 0.0) -> None:
        """End all workers, after `grace_s` to end by themselves, and close."""
        if grace_s > 0 and not await self.wait(grace_s):
            self.stop(list(self._running))
            await self.wait(GRACE_S)
        for worker in list(self._running):
            self.kill(worker)
        await self.wait(GRACE_S)
        self.close()

    def _start(self, worker: WorkerId) -> None:
        path = self._logs / f"{worker}.log"
        with suppress(OSError):  # the drain makes it when there is room
            path.touch()
        output = WorkerOutput(path)
        self.console.follow(worker, path)
        try:
            try:
                process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output.write_end,
                    stderr=subprocess.STDOUT,
                    env={**self._env, **self._gpus.assign(worker), "EVENSTEP_WORKER": worker},
                    start_new_session=True,  # Ctrl-C reaches only the coordinator
                )
            finally:
                os.close(output.write_end)
            running = register_process(process, path, output)
        except BaseException:
            output.wait()  # nobody prints any more
            output.close()
            self._gpus.release(worker)
            self.console.unfollow(worker)
            raise
        self._watch(worker, running)

    def _watch(self, worker: WorkerId, running: LocalProcess) -> None:
        self._running[worker] = running
        self._all_ended.clear()
        asyncio.get_running_loop().add_reader(running.pidfd, self._ended, worker)
        if self._poll_timer is None:
            self._poll()

    def _poll(self) -> None:
        try:
            for worker, running in list(self._running.items()):
                if worker not in self._dying and (number := running.killed_by()):
                    self._dying.add(worker)
                    self._on_dying(worker, number)
                with suppress(psutil.Error):  # it has ended
                    self._keep_files(running)
        finally:
            # Less often with many workers: this costs at most half a percent of a core.
            after_s = POLL_S * max(1.0, len(self._running) / 16)
            loop = asyncio.get_running_loop()
            self._poll_timer = loop.call_later(after_s, self._poll) if self._running else None

    def _keep_files(self, running: LocalProcess) -> None:
        """Write a missing pid file, and drain the output. What fails is tried again."""
        problem, pid_file = "", running.log.with_suffix(".pid")
        try:
            if running.process is not None and not pid_file.exists():
                write_pid_file(running.process.pid, pid_file)
            if running.output is not None:
                running.output.poll()
        except OSError as e:
            problem = f"{running.log.parent}: {e.strerror}"
        if problem and problem != self._problem:
            log.warning("%s; files of workers are written once they can be", problem)
        self._problem = problem

    def _ended(self, worker: WorkerId) -> None:
        running = self._running[worker]
        asyncio.get_running_loop().remove_reader(running.pidfd)
        running.kill()  # not reaped yet, so its process group id cannot have been reused
        # Only the parent learns the exit code. A script that failed has reported it.
        code = running.process.wait() if running.process else os.EX_TEMPFAIL
        self._drained(worker, code, DRAIN_S)

    def _drained(self, worker: WorkerId, code: int, left_s: float) -> None:
        """Report the end of a worker, once the last of its output is in the log."""
        running = self._running[worker]
        if running.output is not None and not running.output.poll() and left_s > 0:
            loop = asyncio.get_running_loop()
            loop.call_later(DRAIN_POLL_S, self._drained, worker, code, left_s - DRAIN_POLL_S)
            return
        del self._running[worker]
        self._ended_workers[worker] = Observed(stage=Stage.ENDED, exit_code=code)
        running.close()
        self._dying.discard(worker)
        self._gpus.release(worker)
        self.console.unfollow(worker)
        if not self._running:
            self._all_ended.set()
        self._on_end(worker, code, tail(running.log))


def worker_environment(
    environment: Mapping[str, str],
    *,
    coordinator: str,
    token_file: Path | None = None,
    address: str = "",
    num_workers: int = 1,
) -> dict[str, str]:
    """The environment of a worker process; the user's own variables take precedence."""
    cores = len(os.sched_getaffinity(0))
    own = {
        "OMP_NUM_THREADS": str(max(1, cores // max(1, num_workers))),
        "PYTHONUNBUFFERED": "1",  # otherwise its output appears much later
        **({"EVENSTEP_ADDRESS": address} if address else {}),
    }
    # EVENSTEP_TOKEN would override this run's token file.
    kept = {k: v for k, v in environment.items() if k != "EVENSTEP_TOKEN"}
    token = {"EVENSTEP_TOKEN_FILE": str(token_file)} if token_file else {}
    return {**own, **kept, "EVENSTEP_COORDINATOR": coordinator, **token}


def tail(log: Path) -> str:
    """The end of a log; empty if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
