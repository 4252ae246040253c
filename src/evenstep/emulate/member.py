"""One worker's process: tied to its parent, its output kept, ended with all its kin."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType

from evenstep.emulate.quota import Quota

_TETHER = Path(__file__).with_name("tether.py")


class Member:
    """A command that runs under a quota (or none) until it ends, `end` is called, or we die.

    `pidfd` turns readable when it has ended. The kernel ties it to the thread that made it: that
    thread has to stay.
    """

    def __init__(
        self, rank: int, command: Sequence[str], env: Mapping[str, str], quota: Quota | None
    ) -> None:
        self.rank, self._quota = rank, quota
        self._output = TemporaryFile()  # noqa: SIM115  a pipe would have to be drained
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,  # a process group of its own, to be ended as one
        )
        self.pidfd = os.pidfd_open(self._process.pid)
        try:
            if quota is not None:
                quota.add(self._process.pid)
        except ProcessLookupError:
            pass  # it ended at once: whoever watches will see why
        except BaseException:
            self.end()
            raise

    def end(self) -> int:
        """End it, if it still runs, and whatever it started; its exit code."""
        if self._process.returncode is None:
            # Not reaped yet, so the number of its group cannot have passed to others.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for pid in self._quota.pids() if self._quota else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # kin that left the group
            self._process.wait()
            os.close(self.pidfd)
        return self._process.returncode

    def output(self) -> str:
        """What it has said so far."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    def __enter__(self) -> Member:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()
        self._output.close()
