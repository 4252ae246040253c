"""Emulated devices, on a fake clock."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.emulate import DeviceCurve, DeviceMemoryError
from tests.emulate.fake_time import FakeTime

GPU = DeviceCurve(per_sample_s=0.001, fixed_s=0.005, floor_s=0.02, cap=64)


@pytest.mark.parametrize(
    ("samples", "seconds"), [(0, 0.0), (1, 0.02), (15, 0.02), (16, 0.021), (64, 0.069)]
)
def test_time_is_flat_up_to_the_knee_then_a_line(samples: int, seconds: float) -> None:
    assert GPU.seconds(samples) == pytest.approx(seconds)


@given(samples=st.integers(1, 64), computed_s=st.floats(0, 0.018))
def test_a_step_ends_on_time_however_long_the_real_compute_took(
    samples: int, computed_s: float
) -> None:
    time = FakeTime()
    started_s = time.now_s
    time.now_s += computed_s
    late_s = GPU.run(samples, started_s, clock=time.clock, sleep=time.sleep)
    assert time.now_s - started_s == pytest.approx(GPU.seconds(samples), abs=2e-5)
    assert 0 <= late_s < 2e-5
    assert len(time.slept_s) == 1


def test_the_last_moment_is_spun_not_slept() -> None:
    time = FakeTime()
    GPU.run(1, time.now_s + 0.0002 - 0.02, clock=time.clock, sleep=time.sleep)
    assert time.slept_s == []


def test_compute_slower_than_the_device_is_reported_as_lateness() -> None:
    time = FakeTime()
    late_s = GPU.run(1, time.now_s - 0.05, clock=time.clock, sleep=time.sleep)
    assert late_s == pytest.approx(0.03, abs=1e-4)
    assert time.slept_s == []


def test_one_sample_too_many_is_out_of_memory_with_the_numbers() -> None:
    assert GPU.seconds(64) > 0
    time = FakeTime()
    with pytest.raises(MemoryError, match="65 samples on an emulated device that holds 64") as e:
        GPU.run(65, time.now_s, clock=time.clock, sleep=time.sleep)
    assert isinstance(e.value, DeviceMemoryError)
    assert (e.value.samples, e.value.cap) == (65, 64)
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)


def test_a_slowed_device_takes_a_factor_longer_and_holds_as_much() -> None:
    slowed = GPU.slowed(3.0)
    assert [slowed.seconds(n) for n in (1, 40)] == pytest.approx(
        [3 * GPU.seconds(n) for n in (1, 40)]
    )
    assert slowed.cap == GPU.cap


@pytest.mark.parametrize(
    "wrong", [{"per_sample_s": -1.0}, {"fixed_s": float("nan")}, {"floor_s": -0.1}, {"cap": 0}]
)
def test_an_impossible_device_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"device: {next(iter(wrong))}"):
        replace(GPU, **wrong)  # type: ignore[arg-type]
