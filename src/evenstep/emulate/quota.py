"""CPU quotas for running processes, always removed again.

A cgroup carries its owner in its name. It is removed when the owner closes it or exits; if the
owner was killed, the next process that makes a quota (or calls `sweep`) removes it.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import psutil

from evenstep.emulate.cgroup import Hierarchy, NoQuotaError

_NAME = re.compile(r"evenstep-(?P<pid>\d+)-(?P<started>\d+)-\d+")
_serial = count()


class Quota:
    """Limits processes, with their threads and children, to `cores` cores' worth of CPU time.

    A quota is a ceiling: on a busy machine they may get less. With `firm` the kernel serves them
    before everything else, interference included.
    """

    def __init__(
        self, cores: float, *, firm: bool = False, hierarchy: Hierarchy | None = None
    ) -> None:
        self._hierarchy = hierarchy or Hierarchy.find()
        sweep(self._hierarchy)
        self.path = self._hierarchy.create(new_name())
        # Runs at close, at garbage collection or at interpreter exit, whichever comes first.
        self._remove = weakref.finalize(self, _remove, self._hierarchy, self.path, os.getpid())
        try:
            if firm:
                self._hierarchy.prefer(self.path)
            self.set(cores)
        except OSError as e:
            self.close()
            raise NoQuotaError(f"{self.path} takes no limit ({e.strerror})") from e
        except BaseException:
            self.close()
            raise

    def set(self, cores: float) -> None:
        """Change the limit; `inf` for no limit."""
        self._hierarchy.limit(self.path, cores)
        self.cores = cores

    def add(self, pid: int) -> None:
        """Add a running process with its descendants; children born later inherit the quota."""
        seen: set[int] = set()
        while family := _family(pid) - seen:  # repeat: a child may have been born meanwhile
            for relative in family:
                try:
                    found = self._hierarchy.put(relative, self.path)
                except OSError as e:
                    raise NoQuotaError(f"process {relative} cannot be moved ({e.strerror})") from e
                if relative == pid and not found:
                    raise ProcessLookupError(f"there is no process {pid} to limit")
            seen |= family

    def wrap(self, command: Sequence[str]) -> list[str]:
        """`command`, under this quota from its first instruction on.

        A running process that `add` moves may have left children of its own behind.
        """
        return [
            "sh",
            "-c",
            'echo $$ > "$0" && exec "$@"',
            str(self._hierarchy.procs(self.path)),
            *command,
        ]

    def pids(self) -> list[int]:
        """The processes under this quota."""
        return self._hierarchy.pids(self.path)

    def close(self) -> None:
        """Release the processes and remove the cgroup. May be called again."""
        self._remove()

    def __enter__(self) -> Quota:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep(hierarchy: Hierarchy | None = None) -> list[Path]:
    """Release the processes of cgroups whose owner is gone, and remove these. Returns them."""
    hierarchy = hierarchy or Hierarchy.find()
    removed = list(orphans(hierarchy.root))
    for group in removed:
        hierarchy.remove(group)
    return removed


def _remove(hierarchy: Hierarchy, group: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not remove its parent's quota
        hierarchy.remove(group)


def _family(pid: int) -> set[int]:
    try:
        return {pid, *(p.pid for p in psutil.Process(pid).children(recursive=True))}
    except psutil.NoSuchProcess:
        return {pid}


def new_name() -> str:
    """A name unique to this process, also among past and future ones."""
    # With the start time, because a pid can be reused.
    return f"evenstep-{os.getpid()}-{_started_ticks(os.getpid())}-{next(_serial)}"


def orphans(folder: Path) -> Iterator[Path]:
    """Entries of a folder whose owner is gone."""
    for path in sorted(folder.glob("evenstep-*")):
        named = _NAME.fullmatch(path.name)
        if named and _started_ticks(int(named["pid"])) != int(named["started"]):
            yield path


def _started_ticks(pid: int) -> int | None:
    """When a process started, in ticks since boot; None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = stat[stat.rindex(")") + 1 :].split()  # the name may hold anything
    return None if state in "ZX" else int(fields[18])
