"""Compute time of a step on this worker, without waiting for other workers.

It runs from the moment the batch is in hand to the moment the last local gradient is ready. On CUDA
these are events on the stream, read a step later so that the host need not wait for them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

MIN_S = 1e-9


class Clock(Protocol):
    """Takes timestamps, and measures the seconds between two of them."""

    deferred: bool  # reading a timestamp at once would block

    def now(self) -> Any: ...
    def elapsed_s(self, earlier: Any, later: Any) -> float: ...


class HostClock:
    """For the CPU, where work is complete when the call returns."""

    deferred = False

    def now(self) -> float:
        return time.perf_counter()

    def elapsed_s(self, earlier: float, later: float) -> float:
        return later - earlier


class StreamClock:
    """For a GPU, which runs behind the host: timestamps are CUDA events.

    Reading one blocks until the GPU has reached it.
    """

    deferred = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        # The model's GPU: the calling thread's current device may be another one.
        event.record(torch.cuda.current_stream(self._device))
        return event

    def elapsed_s(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        later.synchronize()  # elapsed_time raises instead of waiting
        earlier.synchronize()  # it may be on another stream
        return float(earlier.elapsed_time(later) / 1000)


@dataclass(slots=True)
class StepTimes:
    """Timestamps of one step: batch in hand, then gradients ready and reduced, alternating."""

    stamps: list[Any] = field(default_factory=list)
    samples: int = 0
    waited_s: float = 0.0  # for other workers in the middle of a pass

    @property
    def has_backward(self) -> bool:
        """Whether the step had a backward pass."""
        return len(self.stamps) > 1


class Meter:
    """Measures the compute time and the wait time of each step.

    On a GPU it reports the previous step's compute time if that had as many samples. Otherwise, in
    the first step and when shares change, the host waits for its GPU once.
    """

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        on_gpu = device.type == "cuda"
        self._clock = clock or (StreamClock(device) if on_gpu else HostClock())
        self._step = StepTimes()
        self._previous: StepTimes | None = None

    def begin(self) -> None:
        """The batch is in hand."""
        if self._step.has_backward:
            self._previous = self._step
        self._step = StepTimes([self._clock.now()])

    def ready(self, samples: int) -> float:
        """The last local gradient of a backward pass is ready: the compute time of the step.

        `samples`: of the step at hand.
        """
        step, previous = self._step, self._previous
        if len(step.stamps) % 2 == 0:  # the previous pass was never reduced
            del step.stamps[-1:]
        step.stamps.append(self._clock.now())
        step.samples = samples
        if self._clock.deferred and previous is not None and previous.samples == samples:
            step = previous
        return max(MIN_S, self._sum(step.stamps) - step.waited_s)

    def reduced(self) -> None:
        """The gradients are reduced: the time since `ready` was spent waiting."""
        self._step.stamps.append(self._clock.now())

    def waited(self, seconds: float) -> None:
        """Count time spent waiting for other workers in mid-pass, as in synchronised layers."""
        self._step.waited_s += seconds

    @property
    def wait_s(self) -> float:
        """How long the previous step waited for other workers."""
        if self._previous is None:
            return 0.0
        return self._sum(self._previous.stamps[1:]) + self._previous.waited_s

    def _sum(self, stamps: list[Any]) -> float:
        """The sum of every other interval, beginning with the first."""
        return sum(map(self._clock.elapsed_s, stamps[::2], stamps[1::2]))
