"""Compute and wait times of steps, by the host's clock and by a GPU's events."""

from __future__ import annotations

import pytest
import torch

from evenstep.train.measure.meter import MIN_S, Clock, Meter, StreamClock

CPU = torch.device("cpu")


class ManualClock:
    """A host clock that the test sets."""

    deferred = False

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def elapsed_s(self, earlier: float, later: float) -> float:
        return later - earlier


class FakeGpu:
    """Runs behind the host, and completes events when it reaches them, like CUDA."""

    def __init__(self) -> None:
        self.queued_s = 0.0  # end of the queued work
        self.done_s = 0.0  # how far it has come
        self.num_waits = 0  # of the host for the GPU

    def work(self, seconds: float) -> None:
        self.queued_s += seconds

    def catch_up(self) -> None:
        self.done_s = self.queued_s


class Event:
    """Behaves like torch.cuda.Event, see c10/cuda/CUDAEvent.h."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu, self._at_s = gpu, gpu.queued_s

    @property
    def done(self) -> bool:
        return self._gpu.done_s >= self._at_s

    def synchronize(self) -> None:
        if not self.done:
            self._gpu.num_waits += 1
            self._gpu.done_s = self._at_s

    def elapsed_time(self, other: Event) -> float:
        if not (self.done and other.done):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (other._at_s - self._at_s) * 1000


class FakeStreamClock(StreamClock):
    """The real clock with events of a fake GPU."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu

    def now(self) -> Event:  # type: ignore[override]
        return Event(self.gpu)


def step(meter: Meter, gpu: FakeGpu, seconds: float, samples: int, wait_s: float = 0.0) -> float:
    """The reported compute time of a step that the host completes before its GPU begins."""
    meter.begin()
    gpu.work(seconds)
    reported = meter.ready(samples)
    gpu.work(wait_s)
    meter.reduced()
    return reported


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture
def meter(gpu: FakeGpu) -> Meter:
    clock: Clock = FakeStreamClock(gpu)
    return Meter(CPU, clock)


def test_a_gpu_is_read_a_step_later_without_waiting(meter: Meter, gpu: FakeGpu) -> None:
    step(meter, gpu, 0.5, 8)
    gpu.catch_up()
    gpu.num_waits = 0
    assert step(meter, gpu, 0.7, 8) == pytest.approx(0.5)
    gpu.catch_up()
    assert step(meter, gpu, 0.9, 8) == pytest.approx(0.7)
    assert gpu.num_waits == 0


def test_the_host_waits_for_a_gpu_that_is_still_behind(meter: Meter, gpu: FakeGpu) -> None:
    step(meter, gpu, 0.5, 8)
    gpu.done_s, gpu.num_waits = 0.0, 0  # it has done nothing yet
    assert step(meter, gpu, 0.7, 8) == pytest.approx(0.5)
    assert gpu.num_waits == 1
    assert gpu.done_s == 0.5  # no longer than necessary


def test_the_first_step_on_a_gpu_reports_its_own_time(meter: Meter, gpu: FakeGpu) -> None:
    assert step(meter, gpu, 0.5, 8) == pytest.approx(0.5)


def test_when_shares_change_the_reported_time_is_for_the_new_share(
    meter: Meter, gpu: FakeGpu
) -> None:
    shares = [8, 8, 16, 16, 4, 4, 4]
    reported = [step(meter, gpu, 0.1 * samples, samples) for samples in shares]
    assert reported == pytest.approx([0.1 * samples for samples in shares])


@pytest.mark.parametrize("passes", [1, 3])
def test_waiting_for_all_reduces_on_a_gpu_is_not_compute_time(
    meter: Meter, gpu: FakeGpu, passes: int
) -> None:
    meter.begin()
    for _ in range(passes):
        gpu.work(0.2)
        computed_s = meter.ready(8)
        gpu.work(0.3)
        meter.reduced()
    assert computed_s == pytest.approx(0.2 * passes)
    meter.begin()
    gpu.work(0.2)
    meter.ready(8)
    assert meter.wait_s == pytest.approx(0.3 * passes)


@pytest.mark.parametrize("lost", ["before", "after"])
def test_a_void_step_does_not_change_what_the_next_one_reports(
    meter: Meter, gpu: FakeGpu, lost: str
) -> None:
    step(meter, gpu, 0.5, 8)
    meter.begin()
    gpu.work(5.0)
    if lost == "after":  # the group was lost after the gradients were ready
        meter.ready(3)
    assert step(meter, gpu, 0.6, 8) == pytest.approx(0.5 if lost == "before" else 0.6)


def test_a_pass_that_was_never_reduced_counts_with_the_next(meter: Meter, gpu: FakeGpu) -> None:
    meter.begin()
    gpu.work(1.0)
    meter.ready(8)
    gpu.work(0.5)
    assert meter.ready(8) == pytest.approx(1.5)
    gpu.work(0.25)
    meter.reduced()
    meter.begin()
    assert meter.wait_s == pytest.approx(0.25)


def test_a_host_reports_the_current_step_without_its_waits() -> None:
    clock = ManualClock()
    meter = Meter(CPU, clock)
    meter.begin()
    for _ in range(2):
        clock.now_s += 1.0
        meter.ready(8)
        clock.now_s += 0.5
        meter.reduced()
    meter.begin()
    assert meter.wait_s == 1.0
    clock.now_s += 2.0
    meter.waited(0.25)  # in a synchronised layer
    assert meter.ready(8) == 1.75
    meter.reduced()
    meter.begin()
    assert meter.wait_s == 0.25
    assert meter.ready(8) == MIN_S
