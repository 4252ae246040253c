"""The contract of forecasters, and series to test them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from evenstep.ports import Forecaster
from evenstep.types import FloatArray

Series = tuple[FloatArray, FloatArray]
"""Speeds `[step, worker]` and outlooks `[step, worker, (free CPU, free memory)]`."""


def interference(
    *, steps: int, workers: int, seed: int, noise: float = 0.03, announced: bool = True
) -> Series:
    """Speed proportional to free CPU, which other jobs take and release at irregular times.

    If `announced`, the outlook shows it with an error of 0.01; free memory is an unrelated random
    walk. Workers differ in speed by up to four orders of magnitude.
    """
    rng = np.random.default_rng(seed)
    free = np.ones((steps, workers))
    for w in range(workers):
        at = int(rng.integers(8, 43))
        while at < steps:
            taken = int(rng.integers(8, 43))
            free[at : at + taken, w] = rng.uniform(0.25, 0.7)
            at += taken + int(rng.integers(8, 43))
    speed, outlook = constant(steps=steps, workers=workers, seed=seed, noise=noise)
    if announced:
        outlook[..., 0] = np.clip(free + 0.01 * rng.standard_normal(free.shape), 0, 1)
    walk = rng.standard_normal(free.shape).cumsum(axis=0)
    outlook[..., 1] = np.clip(0.6 + 0.05 * walk / np.sqrt(steps), 0, 1)
    return speed * free, outlook


def constant(*, steps: int, workers: int, seed: int, noise: float = 0.0) -> Series:
    """Constant speeds with relative noise of the given size, under a constant outlook."""
    rng = np.random.default_rng(seed)
    base = 10 ** rng.uniform(0, 4, size=workers)
    speed = base * np.exp(noise * rng.standard_normal((steps, workers)))
    return speed, np.broadcast_to([1.0, 0.6], (steps, workers, 2)).copy()


def forecasts(forecaster: Forecaster, series: Series) -> FloatArray:
    """One-step-ahead forecasts of `series`: each step is learned after it was forecast."""
    predicted = []
    for speed, outlook in zip(*series, strict=True):
        predicted.append(forecaster.forecast(outlook))
        forecaster.learn(speed, outlook)
    return np.array(predicted)


class ForecasterContract:
    """What every forecaster guarantees. Subclass it as `TestMine` with `make = MyForecaster`."""

    make: ClassVar[Callable[[], Forecaster]]

    def with_roster(self, *workers: str) -> Forecaster:
        """A new forecaster with this roster."""
        forecaster = type(self).make()
        forecaster.set_roster(workers)
        return forecaster

    def test_a_worker_without_measurements_has_no_forecast(self) -> None:
        forecaster = self.with_roster("a", "b")
        assert np.isnan(forecaster.forecast(np.ones((2, 2)))).all()
        forecaster.learn(np.array([5.0, np.nan]), np.ones((2, 2)))
        assert np.isnan(forecaster.forecast(np.ones((2, 2)))).tolist() == [False, True]

    def test_forecasts_of_any_series_are_positive_and_finite(self) -> None:
        speed, outlook = _rough(steps=200, workers=3)
        forecaster = self.with_roster("a", "b", "c")
        predicted = forecasts(forecaster, (speed, outlook))[1:]
        assert np.isfinite(predicted).all()
        assert (predicted > 0).all()

    def test_a_missing_measurement_changes_nothing(self) -> None:
        forecaster = self.with_roster("a", "b")
        forecasts(forecaster, interference(steps=60, workers=2, seed=1))
        outlook = np.array([[0.4, 0.5], [0.9, 0.5]])
        before = forecaster.forecast(outlook)
        forecaster.learn(np.array([np.nan, 7.0]), outlook * 0.8)
        assert forecaster.forecast(outlook)[0] == before[0]

    def test_forecasting_has_no_side_effects(self) -> None:
        series = interference(steps=60, workers=2, seed=2)
        asked, learner = self.with_roster("a", "b"), self.with_roster("a", "b")
        for speed, outlook in zip(*series, strict=True):
            asked.forecast(outlook)
            asked.forecast(1 - outlook)
            asked.learn(speed, outlook)
            learner.learn(speed, outlook)
        assert (asked.forecast(series[1][-1]) == learner.forecast(series[1][-1])).all()

    def test_arguments_are_neither_modified_nor_kept(self) -> None:
        forecaster = self.with_roster("a", "b")
        speed, outlook = np.array([3.0, 4.0]), np.full((2, 2), 0.5)
        forecaster.learn(speed, outlook)
        assert speed.tolist() == [3, 4]
        assert outlook.tolist() == [[0.5, 0.5]] * 2
        before = forecaster.forecast(outlook)
        kept = before.copy()
        speed[:] = 1e6
        before[:] = 1e6
        assert (forecaster.forecast(np.full((2, 2), 0.5)) == kept).all()

    def test_workers_that_stay_are_unaffected_by_joins_and_leaves(self) -> None:
        speed, outlook = interference(steps=120, workers=4, seed=3)
        alone, crowded = self.with_roster("b"), self.with_roster("a", "b", "c")
        for step in range(120):
            if step == 40:
                crowded.set_roster(["b", "c"])
            if step == 80:
                crowded.set_roster(["d", "c", "b"])
            roster = [0, 1, 2] if step < 40 else [1, 2] if step < 80 else [3, 2, 1]
            row = roster.index(1)
            predicted = crowded.forecast(outlook[step, roster])[row]
            np.testing.assert_allclose(predicted, alone.forecast(outlook[step, [1]])[0], rtol=1e-9)
            crowded.learn(speed[step, roster], outlook[step, roster])
            alone.learn(speed[step, [1]], outlook[step, [1]])

    def test_workers_that_change_ranks_keep_their_forecasts(self) -> None:
        forecaster = self.with_roster("a", "b")
        forecasts(forecaster, interference(steps=60, workers=2, seed=7))
        outlook = np.full((2, 2), 0.5)
        before = forecaster.forecast(outlook)
        forecaster.set_roster(["b", "a"])
        np.testing.assert_allclose(forecaster.forecast(outlook), before[::-1], rtol=1e-9)

    def test_workers_that_left_are_forgotten(self) -> None:
        forecaster = self.with_roster("a", "b")
        forecaster.learn(np.array([3.0, 4.0]), np.ones((2, 2)))
        forecaster.set_roster(["a"])
        forecaster.set_roster(["a", "b"])
        assert np.isnan(forecaster.forecast(np.ones((2, 2)))).tolist() == [False, True]

    def test_the_order_of_the_roster_does_not_matter(self) -> None:
        speed, outlook = interference(steps=80, workers=3, seed=4)
        order = [2, 0, 1]
        one = forecasts(self.with_roster("a", "b", "c"), (speed, outlook))
        other = forecasts(self.with_roster("c", "a", "b"), (speed[:, order], outlook[:, order]))
        np.testing.assert_allclose(other, one[:, order], rtol=1e-9)

    def test_a_restored_forecaster_continues_bit_for_bit(self) -> None:
        speed, outlook = interference(steps=100, workers=3, seed=5)
        speed[30:45, 1] = np.nan
        first = self.with_roster("a", "b", "c")
        forecasts(first, (speed[:50], outlook[:50]))
        second = type(self).make()
        second.load_state_dict(first.state_dict())
        rest = (speed[50:], outlook[50:])
        assert (forecasts(first, rest) == forecasts(second, rest)).all()

    def test_a_saved_state_is_plain_data_that_later_steps_do_not_change(self) -> None:
        series = interference(steps=50, workers=2, seed=6)
        forecaster, restored = self.with_roster("a", "b"), type(self).make()
        forecasts(forecaster, series)
        state, predicted = forecaster.state_dict(), forecaster.forecast(series[1][-1])
        assert _is_plain(state)
        forecasts(forecaster, series)
        restored.load_state_dict(state)
        assert (restored.forecast(series[1][-1]) == predicted).all()


def _rough(*, steps: int, workers: int) -> Series:
    """Spikes, gaps, and outlooks that are out of range, missing or constant."""
    rng = np.random.default_rng(0)
    speed, outlook = interference(steps=steps, workers=workers, seed=0, noise=0.3)
    speed *= rng.choice([1, 100, 0.01], size=speed.shape, p=[0.9, 0.05, 0.05])
    speed[1:][rng.random(speed[1:].shape) < 0.2] = np.nan
    outlook *= rng.choice([1, 50, -3, np.nan], size=outlook.shape, p=[0.7, 0.1, 0.1, 0.1])
    outlook[steps // 2 :, 0] = 0.0
    return speed, outlook


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(_is_plain(v) for v in value)
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "fiub"
    return isinstance(value, str | int | float | bool)
