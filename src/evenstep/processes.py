"""Which process is meant, anywhere and at any time; and whether it still runs.

A pid alone means another process on another host, after a reboot, in a container, or once it has
been reused. Start times are in clock ticks since boot: setting the clock does not change them.
"""

from __future__ import annotations

import os
import socket
from enum import Enum
from pathlib import Path
from typing import Self

import msgspec

_PROC = Path("/proc")
_INITIAL_NAMESPACE = 0xEFFFFFFC  # the inode of a machine's own PID namespace, by Linux' ABI


class Liveness(Enum):
    """Whether a process still runs, as far as this one can tell."""

    ALIVE = "alive"
    ENDED = "ended"
    UNKNOWN = "unknown"  # it is, or was, on another host or in another container


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A process, told apart from every other one."""

    host: str
    machine: str  # /etc/machine-id; empty if there is none
    boot: str  # differs between machines, and between boots of one
    namespace: int  # of its pid
    pid: int
    ticks: int  # when it started, since boot

    @classmethod
    def of(cls, pid: int) -> Self:
        """The process that has this pid here and now. Raises OSError if there is none."""
        return cls(
            host=socket.gethostname(),
            machine=_machine(),
            boot=(_PROC / "sys/kernel/random/boot_id").read_text().strip(),
            namespace=(_PROC / "self/ns/pid").stat().st_ino,
            pid=pid,
            ticks=int(_stat(pid)[19]),
        )

    def liveness(self) -> Liveness:
        """Whether it still runs."""
        here = ProcessIdentity.of(os.getpid())
        if (self.boot, self.namespace) == (here.boot, here.namespace):
            return self._liveness_here()
        # A reboot ends everything; but another container may have this host's name.
        bare = self.namespace == here.namespace == _INITIAL_NAMESPACE
        same_machine = (self.host, self.machine) == (here.host, here.machine) and self.machine
        rebooted = bare and same_machine and self.boot != here.boot
        return Liveness.ENDED if rebooted else Liveness.UNKNOWN

    def _liveness_here(self) -> Liveness:
        try:
            stat = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return _hidden(self.pid)
        if int(stat[19]) != self.ticks or stat[0] in (b"Z", b"X"):
            return Liveness.ENDED
        return Liveness.ALIVE


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the third on: state is 0, start time is 19."""
    return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()


def _hidden(pid: int) -> Liveness:
    """Of a process without an entry in /proc, which may hide the processes of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return Liveness.ENDED
    except OSError:
        pass
    return Liveness.UNKNOWN


def _machine() -> str:
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""
