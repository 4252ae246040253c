"""Free CPU and memory of this host, sampled by a background thread."""

from __future__ import annotations

import threading
import time

import psutil

from evenstep.pace import BUDGET_FRACTION


class HostLoad:
    """The latest sample of this host's load; reading it costs the hot path nothing."""

    def __init__(self, every_s: float = 0.25) -> None:
        self.free_cpu, self.free_memory = 1.0, 1.0
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._sample, args=(every_s,), name="evenstep-host-load", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._closed.set()
        self._thread.join()

    def _sample(self, every_s: float) -> None:
        this_process = psutil.Process()
        cores = psutil.cpu_count() or 1
        psutil.cpu_percent(None), this_process.cpu_percent(None)
        wait_s = every_s
        while not self._closed.wait(wait_s):
            began_s = thread_busy_s()
            # This worker's own use counts as free: it is there for the worker to use.
            used = psutil.cpu_percent(None) / 100 - this_process.cpu_percent(None) / 100 / cores
            self.free_cpu = min(1.0, max(0.0, 1.0 - used))
            memory = psutil.virtual_memory()
            self.free_memory = memory.available / memory.total
            # Sample less often on a worker with little CPU.
            wait_s = max(every_s, (thread_busy_s() - began_s) / BUDGET_FRACTION)


def thread_busy_s() -> float:
    """CPU time of this thread plus the time it was runnable and waited for a CPU.

    That is what a background thread takes away from training: on a worker with a tenth of a core,
    ten times its own CPU time. Waiting for the GIL is free: training runs while it holds it.
    """
    try:
        with open("/proc/thread-self/schedstat") as schedstat:
            waited_ns = int(schedstat.read().split()[1])
    except OSError:  # only Linux has it
        waited_ns = 0
    return time.thread_time() + waited_ns / 1e9
