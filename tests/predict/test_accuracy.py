"""Forecasters on synthetic series with a known truth."""

from __future__ import annotations

import numpy as np
import pytest

from evenstep.ports import Forecaster
from evenstep.predict import Arima, Ema, Gated, Last, Lstm, Narx, Rnn
from evenstep.testing import Series, constant, forecasts, interference

WORKERS = 32


def rmse(forecaster: Forecaster, series: Series) -> float:
    """Root mean squared error from the second step on, each worker's mean speed being one."""
    forecaster.set_roster([f"w{i}" for i in range(series[0].shape[1])])
    speed, predicted = series[0], forecasts(forecaster, series)
    return float(np.sqrt(np.mean(((predicted[1:] - speed[1:]) / speed.mean(axis=0)) ** 2)))


@pytest.mark.parametrize("noise", [0.02, 0.04])
@pytest.mark.parametrize("net", [Narx, Rnn, Lstm])
def test_a_net_foresees_interference_that_free_cpu_announces(
    net: type[Narx | Rnn | Lstm], noise: float
) -> None:
    series = interference(steps=300, workers=WORKERS, seed=1, noise=noise)
    blind = min(rmse(Last(), series), rmse(Ema(), series), rmse(Arima(), series))
    assert rmse(net(), series) < 0.55 * blind
    assert rmse(Gated(inner=net()), series) < 0.6 * blind


def test_narx_needs_to_see_a_change_once() -> None:
    def one_worker(*values: tuple[float, int]) -> list[float]:
        return [value for value, steps in values for _ in range(steps)]

    free = np.array(one_worker((1.0, 20), (0.5, 20), (1.0, 20), (0.5, 5)))[:, None]
    outlook = np.stack([free, np.full_like(free, 0.6)], axis=-1)
    narx = Narx()
    narx.set_roster(["a"])
    predicted = forecasts(narx, (800 * free, outlook))[:, 0]
    assert predicted[20] == pytest.approx(800)  # unpredictable
    assert predicted[40] == pytest.approx(800, rel=0.1)
    assert predicted[60] == pytest.approx(400, rel=0.05)


def test_a_net_learns_a_relation_that_is_not_linear() -> None:
    _, outlook = interference(steps=800, workers=WORKERS, seed=2)
    speed, _ = constant(steps=800, workers=WORKERS, seed=2, noise=0.03)
    speed *= np.minimum(1, outlook[..., 0] / 0.6)  # no effect above 60 % free CPU
    one_unit, eight = Narx(width=1), Narx(width=8)
    assert rmse(eight, (speed, outlook)) < 0.95 * rmse(one_unit, (speed, outlook))


@pytest.mark.parametrize("noise", [0.001, 0.01, 0.03])
@pytest.mark.parametrize("forecaster", [Narx, Rnn, Lstm, Arima])
def test_noise_around_a_constant_is_smoothed(
    forecaster: type[Narx | Rnn | Lstm | Arima], noise: float
) -> None:
    series = constant(steps=300, workers=WORKERS, seed=3, noise=noise)
    assert rmse(forecaster(), series) < 0.9 * rmse(Last(), series)
    assert rmse(Gated(inner=forecaster()), series) < 0.9 * rmse(Last(), series)


def test_an_uninformative_outlook_does_not_mislead() -> None:
    speed, _ = constant(steps=300, workers=WORKERS, seed=4, noise=0.03)
    _, outlook = interference(steps=300, workers=WORKERS, seed=5)
    assert rmse(Narx(), (speed, outlook)) < rmse(Last(), (speed, outlook))


@pytest.mark.parametrize("forecaster", [Ema, Arima, Narx, Rnn, Lstm])
def test_a_constant_speed_is_forecast_exactly(
    forecaster: type[Ema | Arima | Narx | Rnn | Lstm],
) -> None:
    assert rmse(forecaster(), constant(steps=100, workers=WORKERS, seed=6)) == 0


@pytest.mark.parametrize("forecaster", [Arima, Narx, Rnn, Lstm])
def test_an_unannounced_jump_is_followed_at_once(
    forecaster: type[Arima | Narx | Rnn | Lstm],
) -> None:
    speed, outlook = constant(steps=200, workers=WORKERS, seed=7, noise=0.03)
    speed[120:] /= 3
    follower = forecaster()
    follower.set_roster([f"w{i}" for i in range(WORKERS)])
    predicted = forecasts(follower, (speed, outlook))
    assert np.abs(predicted[121:124] / speed[121:124] - 1).mean() < 0.08


def test_noise_after_a_long_calm_is_smoothed() -> None:
    speed, outlook = constant(steps=1200, workers=4, seed=9)
    noisy, _ = constant(steps=200, workers=4, seed=9, noise=0.03)
    speed[1000:] = noisy

    def late_error(forecaster: Narx | Last) -> float:
        forecaster.set_roster(["a", "b", "c", "d"])
        predicted = forecasts(forecaster, (speed, outlook))[1100:]
        return float(np.abs(predicted / speed[1100:] - 1).mean())

    assert late_error(Narx()) < 0.9 * late_error(Last())


def test_arima_recovers_the_coefficients_of_a_series() -> None:
    rng = np.random.default_rng(10)
    noise = 0.01 * rng.standard_normal((3000, 1))
    grows, smooths = np.zeros((3000, 1)), np.zeros((3000, 1))
    for k in range(1, 3000):
        grows[k] = 0.6 * grows[k - 1] + noise[k]
        smooths[k] = noise[k] - 0.7 * noise[k - 1]
    for change, arima, coefficient in (
        (grows, Arima(p=1, q=0), 0.6),
        (smooths, Arima(p=0, q=1), -0.7),
    ):
        arima.set_roster(["a"])
        forecasts(arima, (100 * np.exp(change.cumsum(axis=0)), np.ones((3000, 1, 2))))
        assert arima.state_dict()["weights"][0, 0] == pytest.approx(coefficient, abs=0.07)


def test_forecasts_are_scale_invariant() -> None:
    speed, outlook = interference(steps=100, workers=1, seed=8)
    slow, fast = Narx(), Narx()
    slow.set_roster(["a"])
    fast.set_roster(["a"])
    predicted = forecasts(slow, (speed, outlook)) * 1e4
    np.testing.assert_allclose(forecasts(fast, (speed * 1e4, outlook)), predicted, rtol=1e-9)
