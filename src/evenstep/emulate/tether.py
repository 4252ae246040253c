"""Run as a script by `crew.py`: becomes a command that does not outlive its parent.

Arguments: the parent's pid, then the command. Imports nothing of evenstep, so that it costs
milliseconds; asked of the kernel in the child itself, since running Python between fork and exec
is not safe in a process that has threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Become the command; the kernel kills it when the thread that started it ends."""
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit("evenstep: this system cannot tie a process to its parent")
    if os.getppid() != parent:
        sys.exit("evenstep: the parent ended before this worker began")
    try:
        os.execvp(command[0], command)
    except OSError as e:
        sys.stderr.write(f"evenstep: cannot run {command[0]}: {e.strerror}\n")
        sys.exit(127)  # as a shell would


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
