"""CPU quotas for processes: made, changed while they run, and always taken away again.

A group carries its owner in its name. It goes when the owner closes it or ends; if the owner was
killed, the next process that makes a quota (or calls `sweep`) removes it.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from types import TracebackType

import psutil

from evenstep.emulate.cgroup import Hierarchy, NoQuotaError
from evenstep.emulate.owner import new_name, orphans


class Quota:
    """So many cores' worth of CPU time for the processes put in, threads and children included.

    A quota is a ceiling: on a busy machine they may get less. With `firm` they are served before
    everything that is not, and so get it whoever else runs, interference included.
    """

    def __init__(
        self, cores: float, *, firm: bool = False, hierarchy: Hierarchy | None = None
    ) -> None:
        self._hierarchy = hierarchy or Hierarchy.find()
        sweep(self._hierarchy)
        self.path = self._hierarchy.make(new_name())
        # Runs at close, when collected, or when the interpreter ends: whichever is first.
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
        """From now on so many cores; `inf` for no limit."""
        self._hierarchy.limit(self.path, cores)
        self.cores = cores

    def add(self, pid: int) -> None:
        """Put a running process in, with its threads and descendants; those to come follow."""
        seen: set[int] = set()
        while family := _family(pid) - seen:  # again: one may have been born meanwhile
            for member in family:
                try:
                    found = self._hierarchy.put(member, self.path)
                except OSError as e:
                    raise NoQuotaError(f"process {member} cannot be moved ({e.strerror})") from e
                if member == pid and not found:
                    raise ProcessLookupError(f"there is no process {pid} to put under a quota")
            seen |= family

    def pids(self) -> list[int]:
        """The processes under this quota."""
        return self._hierarchy.pids(self.path)

    def close(self) -> None:
        """Release the processes and remove the group. May be called again."""
        self._remove()

    def __enter__(self) -> Quota:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def sweep(hierarchy: Hierarchy | None = None) -> list[Path]:
    """Remove the groups whose owner is gone; which they were. Processes in them are released."""
    hierarchy = hierarchy or Hierarchy.find()
    left = list(orphans(hierarchy.root))
    for group in left:
        hierarchy.remove(group)
    return left


def _remove(hierarchy: Hierarchy, group: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child that ends does not take its parent's quota along
        hierarchy.remove(group)


def _family(pid: int) -> set[int]:
    try:
        return {pid, *(p.pid for p in psutil.Process(pid).children(recursive=True))}
    except psutil.NoSuchProcess:
        return {pid}
