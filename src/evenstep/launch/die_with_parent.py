"""Ends a child process with its parent.

Also the script that the child runs first: the child itself must ask the kernel, because running
Python between fork and exec is not safe in a process with threads. Imports nothing of evenstep, so
the script starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def die_with_parent(command: Sequence[str]) -> list[str]:
    """`command`, wrapped so that the kernel kills it when the thread that starts it ends."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _exec(parent: int, command: list[str]) -> None:
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit("evenstep: this system cannot end a process with its parent")
    if os.getppid() != parent:
        sys.exit("evenstep: the parent ended before this worker started")
    try:
        os.execvp(command[0], command)
    except OSError as e:
        sys.stderr.write(f"evenstep: cannot run {command[0]}: {e.strerror}\n")
        sys.exit(127)  # as a shell would


if __name__ == "__main__":
    _exec(int(sys.argv[1]), sys.argv[2:])
