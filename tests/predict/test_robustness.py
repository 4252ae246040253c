"""Forecasts are valid speeds on any series, however rough."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hypothesis_examples import examples

from evenstep.predict import FORECASTERS, Gated
from evenstep.testing import interference

level = st.floats(1e-3, 1e6)
factor = st.sampled_from([1.0, 1.0, 1.0, 0.97, 1.03, 2.0, 100.0, 0.01, np.nan])
share = st.one_of(st.floats(0, 1), st.sampled_from([-5.0, 0.0, 1.0, 1e12, np.nan, np.inf]))
step = st.tuples(factor, share, share)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", FORECASTERS)
@examples(40)
@given(base=level, steps=st.lists(step, min_size=1, max_size=60), repeat=st.integers(1, 4))
def test_forecasts_stay_within_twice_the_measured_range(
    name: str, gated: bool, base: float, steps: list[tuple[float, float, float]], repeat: int
) -> None:
    bare = FORECASTERS[name]()
    forecaster = Gated(inner=bare, min_steps=2) if gated else bare
    forecaster.set_roster(["a"])
    forecaster.learn(np.array([base]), np.full((1, 2), 0.5))
    low = high = base
    for times, cpu, memory in steps * repeat:
        outlook = np.array([[cpu, memory]])
        predicted = forecaster.forecast(outlook)[0]
        assert low / 2.001 <= predicted <= high * 2.001
        forecaster.learn(np.array([base * times]), outlook)
        low, high = np.fmin(low, base * times), np.fmax(high, base * times)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] * (n in ("lstm", "rnn"))) for n in FORECASTERS],
)
def test_thousands_of_steps_with_spikes_leave_the_state_sound(name: str) -> None:
    rng = np.random.default_rng(0)
    speed, outlook = interference(steps=3_000, workers=4, seed=1)
    speed *= rng.choice([1, 100, 0.01], size=speed.shape, p=[0.98, 0.01, 0.01])
    forecaster = FORECASTERS[name]()
    forecaster.set_roster(["a", "b", "c", "d"])
    for s, o in zip(speed, outlook, strict=True):
        forecaster.learn(s, o)
    state = forecaster.state_dict()
    assert all(np.isfinite(v).all() for k, v in state.items() if k != "workers")
    for name, column in state.items():
        if name.endswith("covariance"):
            diagonal = np.array([column[i, i] for i in range(len(column))])
            assert ((diagonal > 0) & (diagonal < 1)).all()


@pytest.mark.parametrize("worthless", [0.0, -1.0, np.inf, -np.inf])
@pytest.mark.parametrize("name", FORECASTERS)
def test_an_invalid_speed_counts_as_not_measured(name: str, worthless: float) -> None:
    forecaster = FORECASTERS[name]()
    forecaster.set_roster(["a"])
    forecaster.learn(np.array([5.0]), np.ones((1, 2)))
    forecaster.learn(np.array([worthless]), np.ones((1, 2)))
    assert forecaster.forecast(np.ones((1, 2))) == [5.0]
