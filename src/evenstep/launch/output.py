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


def start_drain(log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The process that drains a new pipe into a log, and the pipe's end to print into.

    The process ends when every copy of that end is closed.
    """
    read_end, write_end = os.pipe()
    try:
        with suppress(OSError):  # this user's pipes are limited
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        command = [sys.executable, "-I", "-S", __file__, str(log)]
        drain = subprocess.Popen(
            command,
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # it ends with the worker, not with the coordinator
        )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return drain, write_end


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
