"""Drains a worker's output into its log, in a process of its own.

Workers print into a pipe: a full disk is never a reason to fail a script, nor is a coordinator that
is killed, which this process outlives. What cannot be written is dropped, with a note in the log.
Also the script of that process; it imports nothing of evenstep, so it starts in milliseconds.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

CHUNK_BYTES = 2**16
PIPE_BYTES = 2**20  # as much as a worker may print before it has to wait for the drain


class WorkerOutput:
    """The pipe that a worker prints into, and the process that drains it into the log.

    `write_end` is for the worker; close it once the worker has it. The worker can read from it too,
    so that its writes never fail, whoever else is killed: they wait. The read end is kept here for
    another drain, should somebody kill the first.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read_end, write_only = os.pipe()
        try:
            with suppress(OSError):  # this user's pipes are limited
                fcntl.fcntl(write_only, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            self._drain = self._start_drain()
            self.write_end = os.open(f"/proc/self/fd/{write_only}", os.O_RDWR | os.O_CLOEXEC)
        except BaseException:
            os.close(self._read_end)
            raise
        finally:
            os.close(write_only)

    def poll(self) -> bool:
        """Start another drain if somebody killed it. True: the output has ended and is in the log.

        It ends when every copy of the write end is closed.
        """
        code = self._drain.poll()
        if code is not None and code < 0:
            with suppress(OSError):  # no process can be started now; maybe next time
                self._drain = self._start_drain()
            return False
        return code is not None

    def wait(self) -> None:
        """Wait for the end of the output."""
        self._drain.wait()

    def close(self) -> None:
        """Give the pipe up; what drains it runs on until the output ends."""
        os.close(self._read_end)

    def _start_drain(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(self._log)],
            stdin=self._read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # it ends with the worker, not with the coordinator
        )


def drain(source: int, path: str) -> None:
    """Copy until the end of the source, whatever the disk does."""
    log, num_dropped, problem = -1, 0, ""
    data = b"-"
    while data:
        rest = data = os.read(source, CHUNK_BYTES)
        try:
            if log < 0:
                log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if num_dropped:
                note = f"\n[evenstep: {num_dropped} bytes of output are lost: {problem}]\n"
                os.write(log, note.encode())
                num_dropped = 0
            while rest:
                rest = rest[os.write(log, rest) :]
        except OSError as e:
            num_dropped, problem = num_dropped + len(rest), str(e.strerror)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    drain(0, sys.argv[1])
