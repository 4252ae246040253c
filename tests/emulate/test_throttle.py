"""Throttling in process, on a fake clock."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.emulate import Throttle
from tests.emulate.fake_time import FakeTime


@given(factor=st.floats(1.01, 50), compute_s=st.floats(0.001, 10))
def test_a_step_takes_its_factor_longer(factor: float, compute_s: float) -> None:
    time = FakeTime()
    throttle = Throttle(factor, clock=time.clock, sleep=time.sleep)
    begun_s = time.now_s
    whole_s = throttle.after(compute_s)
    assert time.now_s - begun_s == pytest.approx((factor - 1) * compute_s, abs=1e-4)
    assert whole_s == pytest.approx(factor * compute_s, abs=1e-4)


def test_it_warns_once_that_it_replaces_a_quota(caplog: pytest.LogCaptureFixture) -> None:
    time = FakeTime()
    throttle = Throttle(4.0, clock=time.clock, sleep=time.sleep)
    assert not throttle.used
    with caplog.at_level(logging.WARNING, "evenstep"):
        throttle.after(0.1)
        throttle.after(0.1)
    assert throttle.used
    assert [r.getMessage() for r in caplog.records] == [
        "no CPU quota: throttling in process, x4 by sleeping"
    ]


def test_a_factor_of_one_neither_sleeps_nor_warns(caplog: pytest.LogCaptureFixture) -> None:
    time = FakeTime()
    throttle = Throttle(1.0, clock=time.clock, sleep=time.sleep)
    assert throttle.after(0.1) == 0.1
    assert time.slept_s == []
    assert not throttle.used
    assert not caplog.records


def test_a_factor_function_is_called_at_each_step() -> None:
    time, factors = FakeTime(), iter([2.0, 1.0, 5.0])
    throttle = Throttle(lambda: next(factors), clock=time.clock, sleep=time.sleep)
    assert [round(throttle.after(0.1), 3) for _ in range(3)] == [0.2, 0.1, 0.5]


@pytest.mark.parametrize("factor", [0.5, float("nan"), float("inf"), -2.0])
def test_a_throttle_cannot_speed_up_or_stop(factor: float) -> None:
    with pytest.raises(ValueError, match="factor: must be 1 or more"):
        Throttle(factor)
