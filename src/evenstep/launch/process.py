"""One worker process on this machine, found again by the next coordinator through its pid file."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

EXITING = 0x4  # flag in /proc/PID/stat


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """A running worker: how to notice its end, and how to end it."""

    process: subprocess.Popen[bytes] | None  # None: started by an earlier coordinator
    pidfd: int
    stat: int  # its /proc/PID/stat, kept open in case the pid is reused
    log: Path

    @classmethod
    def open(cls, process: subprocess.Popen[bytes] | None, pid: int, log: Path) -> LocalProcess:
        """Raises ProcessLookupError or FileNotFoundError if the process has just ended."""
        pidfd = os.pidfd_open(pid)
        try:
            return cls(process, pidfd, os.open(f"/proc/{pid}/stat", os.O_RDONLY), log)
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


def register_process(process: subprocess.Popen[bytes], log: Path) -> LocalProcess:
    """Write the pid file for the next coordinator, and watch the process; kill it on failure."""
    try:
        created_s = psutil.Process(process.pid).create_time()
        log.with_suffix(".pid").write_text(f"{process.pid} {created_s}")
        return LocalProcess.open(process, process.pid, log)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
