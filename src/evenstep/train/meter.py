"""Compute time of a step on this worker, waiting on peers never counted.

The clock runs from the moment the batch is in hand to the moment the last local gradient is ready.
On CUDA the two moments are events on the stream, read a step later so that nothing waits for them.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import psutil
import torch

LEAST_S = 1e-9


class Meter:
    """Marks the moments of a step."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._begun: Any = None
        self._ready: Any = None
        self._waited_s = 0.0
        self.wait_s = 0.0  # of the step before
        self._before: tuple[Any, Any] | None = None

    def begin(self) -> None:
        """The batch is in hand."""
        if self._ready is not None:
            self._before, self.wait_s = (self._begun, self._ready), self._waited_s
        self._begun, self._ready, self._waited_s = self._mark(), None, 0.0

    def ready(self) -> None:
        """The last local gradient of a backward pass is ready."""
        self._ready = self._mark()

    def reduced(self) -> None:
        """The sums have arrived: what lies between is waiting."""
        if not self._cuda:
            self._waited_s += time.perf_counter() - self._ready

    def waited(self, seconds: float) -> None:
        """Waiting on peers within a pass, as synchronised layers do."""
        if not self._cuda:
            self._waited_s += seconds

    def compute_s(self) -> float:
        """From the batch to the last gradient, less what earlier passes waited in between."""
        if not self._cuda:
            return float(max(LEAST_S, self._ready - self._begun - self._waited_s))
        if self._before is None:
            return LEAST_S
        begun, ready = self._before
        return float(max(LEAST_S, begun.elapsed_time(ready) / 1000))

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Outlook:
    """Free CPU and memory of this host, read by a thread of its own, off the hot path."""

    def __init__(self, every_s: float = 0.25) -> None:
        self.free_cpu, self.free_memory = 1.0, 1.0
        self._done = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(every_s,), name="evenstep-outlook", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._done.set()
        self._thread.join()

    def _watch(self, every_s: float) -> None:
        me = psutil.Process()
        cores = psutil.cpu_count() or 1
        psutil.cpu_percent(None), me.cpu_percent(None)
        while not self._done.wait(every_s):
            # What others leave: this worker's own use is free to it.
            used = psutil.cpu_percent(None) / 100 - me.cpu_percent(None) / 100 / cores
            self.free_cpu = min(1.0, max(0.0, 1.0 - used))
            memory = psutil.virtual_memory()
            self.free_memory = memory.available / memory.total
