"""Compute time of a step on this worker, waiting on peers never counted.

The clock runs from the moment the batch is in hand to the moment the last local gradient is ready.
On CUDA the moments are events on the stream, read a step later so that nothing waits for them.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import psutil
import torch

from evenstep.pace import BUDGET_FRACTION

LEAST_S = 1e-9


class Clock(Protocol):
    """Marks moments, and says what lies between two of them."""

    late: bool  # whether moments are best read a step later

    def now(self) -> Any: ...
    def between(self, earlier: Any, later: Any) -> float: ...


class HostClock:
    """What the host does is done when it says so."""

    late = False

    def now(self) -> float:
        return time.perf_counter()

    def between(self, earlier: float, later: float) -> float:
        return later - earlier


class StreamClock:
    """The host is ahead of its card: a moment is an event that the card passes when it gets there.

    To read one that the card has not passed yet is to wait for it.
    """

    late = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        # Of the model's card: the thread that asks may have another one as its current device.
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        later.synchronize()  # elapsed_time itself does not wait: it raises
        earlier.synchronize()  # it may be of another stream
        return float(earlier.elapsed_time(later) / 1000)


@dataclass(slots=True)
class Lap:
    """The moments of one step: a batch in hand, then gradients ready and sums there, in turns."""

    marks: list[Any] = field(default_factory=list)
    samples: int = 0
    waited_s: float = 0.0  # within passes

    @property
    def is_ready(self) -> bool:
        """Whether it has had a backward pass."""
        return len(self.marks) > 1


class Meter:
    """Marks the moments of a step.

    On a card, seconds are those of the step before if it had as many samples; if not, as in the
    first step and when shares change, the host waits for its card once.
    """

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        on_card = device.type == "cuda"
        self._clock = clock or (StreamClock(device) if on_card else HostClock())
        self._lap = Lap()
        self._before: Lap | None = None

    def begin(self) -> None:
        """The batch is in hand."""
        if self._lap.is_ready:
            self._before = self._lap
        self._lap = Lap([self._clock.now()])

    def ready(self) -> None:
        """The last local gradient of a backward pass is ready."""
        marks = self._lap.marks
        if len(marks) % 2 == 0:  # the pass before was never reduced
            del marks[-1:]
        marks.append(self._clock.now())

    def reduced(self) -> None:
        """The sums have arrived: what lies between is waiting."""
        self._lap.marks.append(self._clock.now())

    def waited(self, seconds: float) -> None:
        """Waiting on peers within a pass, as synchronised layers do."""
        self._lap.waited_s += seconds

    def compute_s(self, samples: int) -> float:
        """From the batch to the last gradient of a step with so many samples, waiting left out."""
        self._lap.samples = samples
        lap, before = self._lap, self._before
        if self._clock.late and before is not None and before.samples == samples:
            lap = before
        return max(LEAST_S, self._sum(lap.marks) - lap.waited_s)

    @property
    def wait_s(self) -> float:
        """What the step before waited on peers."""
        if self._before is None:
            return 0.0
        return self._sum(self._before.marks[1:]) + self._before.waited_s

    def _sum(self, marks: list[Any]) -> float:
        """Of every other stretch, from the first moment on."""
        return sum(map(self._clock.between, marks[::2], marks[1::2]))


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
        wait_s = every_s
        while not self._done.wait(wait_s):
            begun_s = busy_s()
            # What others leave: this worker's own use is free to it.
            used = psutil.cpu_percent(None) / 100 - me.cpu_percent(None) / 100 / cores
            self.free_cpu = min(1.0, max(0.0, 1.0 - used))
            memory = psutil.virtual_memory()
            self.free_memory = memory.available / memory.total
            # A worker with little CPU looks around less often.
            wait_s = max(every_s, (busy_s() - begun_s) / BUDGET_FRACTION)


def busy_s() -> float:
    """Seconds that this thread has computed for, or has waited for a CPU to do so.

    That is what a thread beside training takes from it: ten times its own computing, on a worker
    with a tenth of a core. Waiting for Python's lock is no loss: training has it meanwhile.
    """
    try:
        with open("/proc/thread-self/schedstat") as told:
            waited_ns = int(told.read().split()[1])
    except OSError:  # only Linux tells
        waited_ns = 0
    return time.thread_time() + waited_ns / 1e9
