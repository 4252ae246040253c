"""One emulated worker's process: dies with its parent, keeps its output, ends its descendants."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from tempfile import TemporaryFile

from evenstep.emulate.quota import Quota
from evenstep.launch.die_with_parent import die_with_parent


class WorkerProcess:
    """Runs a command, with or without a quota, until it exits, `end` is called, or we die.

    `pidfd` becomes readable when the command exits. The thread that creates this object must
    outlive it: the kernel kills the command when that thread ends.
    """

    def __init__(
        self, rank: int, command: Sequence[str], env: Mapping[str, str], quota: Quota | None
    ) -> None:
        self.rank, self._quota = rank, quota
        self._output = TemporaryFile()  # noqa: SIM115  a pipe would have to be drained
        self._process = subprocess.Popen(
            die_with_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,  # a process group of its own, killed as one
        )
        self.pidfd = os.pidfd_open(self._process.pid)
        try:
            if quota is not None:
                quota.add(self._process.pid)
        except ProcessLookupError:
            pass  # it exited at once: the exit code will say why
        except BaseException:
            self.end()
            raise

    def end(self) -> int:
        """Kill the command and its descendants if it still runs. Returns the exit code."""
        if self._process.returncode is None:
            # Not reaped yet, so its process group id cannot have been reused.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for pid in self._quota.pids() if self._quota else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # descendants that left the process group
            self._process.wait()
            os.close(self.pidfd)
        return self._process.returncode

    def output(self) -> str:
        """Standard output and error so far."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._output.close()
