"""Parts of a core for processes: by CPU quotas, or by the throttle in the script without rights."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack, suppress
from pathlib import Path

from bench.turns import assign_cpus
from evenstep.emulate import NoQuotaError, Quota
from evenstep.emulate.worker_api import FOLDER_VARIABLE, set_cores


class Cores:
    """Limits processes, by name. All quotas end with `cleanup`."""

    def __init__(self, folder: Path, cleanup: ExitStack, *, quotas: bool = True) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self._cleanup = folder, cleanup
        self._limited: dict[str, tuple[int, float, Quota]] = {}  # pid, cores, quota
        self.refused = "" if quotas else "quotas are not wanted"
        if quotas:
            try:
                Quota(math.inf).close()
            except NoQuotaError as e:
                self.refused = e.problem

    @property
    def environment(self) -> dict[str, str]:
        """Tells a script where to find its start barrier and its throttle."""
        return {FOLDER_VARIABLE: str(self.folder)}

    def announce(self, name: str) -> None:
        """A process of this name will start: without quotas, it has to throttle itself."""
        if self.refused:
            set_cores(self.folder, name, math.inf)

    def limit(self, name: str, pid: int, cores: float) -> None:
        """Give a running process this many cores from now on."""
        if self.refused:
            set_cores(self.folder, name, cores)
            return
        if name in self._limited:
            quota = self._limited[name][2]
        else:
            quota = self._cleanup.enter_context(Quota(math.inf, firm=True))
            quota.add(pid)
        quota.set(cores)
        self._limited[name] = (pid, cores, quota)
        self._pin()

    def release(self, name: str) -> None:
        """A process has ended."""
        self._limited.pop(name, None)

    def _pin(self) -> None:
        """Give each process a CPU: the kernel may put one that needs most of it beside others."""
        cpus = assign_cpus([cores for _, cores, _ in self._limited.values()])
        for (pid, _, _), cpu in zip(self._limited.values(), cpus, strict=True):
            with suppress(FileNotFoundError):  # the process has just ended
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    with suppress(ProcessLookupError):
                        os.sched_setaffinity(int(thread.name), {cpu})
