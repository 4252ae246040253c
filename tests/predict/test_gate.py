from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from evenstep.errors import ConfigError
from evenstep.predict import Gated, Last, Narx
from evenstep.testing import forecasts, interference
from evenstep.types import FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Scaled(Last):
    """A forecaster that is wrong by a fixed factor, one for each worker."""

    factors: tuple[float, ...]

    def forecast(self, outlook: FloatArray) -> FloatArray:
        return np.multiply(super().forecast(outlook), self.factors)


OUTLOOK = np.ones((2, 2))


def test_each_worker_is_judged_by_itself() -> None:
    gate = Gated(inner=Scaled(factors=(2.0, 1.0)), min_steps=3)
    gate.set_roster(["doubles", "stays"])
    for step in range(6):
        gate.learn(np.array([2.0**step, 2.0**step]), OUTLOOK)
    assert gate.trusted.tolist() == [True, False]  # as good as `last` is not enough
    assert gate.forecast(OUTLOOK).tolist() == [64.0, 32.0]


def test_a_forecaster_is_not_trusted_before_min_steps_comparisons() -> None:
    gate = Gated(inner=Scaled(factors=(2.0, 2.0)), min_steps=3)
    gate.set_roster(["a", "b"])
    doubling = np.array([[2.0**step] * 2 for step in range(6)])
    predicted = forecasts(gate, (doubling, np.ones((6, 2, 2))))
    assert predicted[1:, 0].tolist() == [1, 2, 4, 16, 32]


def test_trust_is_lost_when_the_forecaster_gets_worse() -> None:
    gate = Gated(inner=Scaled(factors=(2.0, 2.0)), min_steps=3)
    gate.set_roster(["a", "b"])
    for step in range(10):
        gate.learn(np.full(2, 2.0**step), OUTLOOK)
    assert gate.trusted.all()
    for _ in range(60):
        gate.learn(np.full(2, 512.0), OUTLOOK)
    assert not gate.trusted.any()
    assert gate.forecast(OUTLOOK).tolist() == [512, 512]


@pytest.mark.parametrize("broken", [np.nan, np.inf, 0.0, -1.0])
def test_an_invalid_forecast_is_never_returned(broken: float) -> None:
    gate = Gated(inner=Scaled(factors=(broken, 2.0)), min_steps=1)
    gate.set_roster(["a", "b"])
    for step in range(4):
        gate.learn(np.full(2, 2.0**step), OUTLOOK)
    assert gate.forecast(OUTLOOK).tolist() == [8.0, 16.0]


def test_a_trusted_forecaster_that_breaks_falls_back_to_last() -> None:
    @dataclass(frozen=True, kw_only=True, eq=False)
    class Breaks(Scaled):
        def forecast(self, outlook: FloatArray) -> FloatArray:
            return np.where(outlook[:, 0] < 0.5, np.nan, super().forecast(outlook))

    gate = Gated(inner=Breaks(factors=(2.0, 2.0)), min_steps=1)
    gate.set_roster(["a", "b"])
    for step in range(4):
        gate.learn(np.full(2, 2.0**step), OUTLOOK)
    assert gate.forecast(np.array([[1.0, 1.0], [0.2, 1.0]])).tolist() == [16.0, 8.0]


def test_one_spike_does_not_destroy_trust() -> None:
    speed, outlook = interference(steps=200, workers=16, seed=1)
    speed[150] *= 100
    gate = Gated(inner=Narx())
    gate.set_roster([f"w{i}" for i in range(16)])
    forecasts(gate, (speed, outlook))
    assert gate.trusted.mean() > 0.8


def test_the_gate_limits_the_cost_of_an_outlook_that_loses_its_meaning() -> None:
    speed, outlook = interference(steps=400, workers=16, seed=2, noise=0.001)
    speed[100:] = speed[0]

    def error(forecaster: Gated | Narx) -> float:
        forecaster.set_roster([f"w{i}" for i in range(16)])
        predicted = forecasts(forecaster, (speed, outlook))[101:]
        return float(np.sqrt(np.mean((predicted / speed[101:] - 1) ** 2)))

    assert error(Gated(inner=Narx())) < 0.85 * error(Narx())


def test_an_invalid_alpha_of_the_gate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"alpha: must lie in \(0, 1\], got 0"):
        Gated(inner=Last(), alpha=0)
