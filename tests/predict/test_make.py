from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from evenstep.errors import ConfigError, InvalidInputError, UnknownSettingError
from evenstep.predict import FORECASTERS, Arima, Ema, Gated, Last, Lstm, Narx, make_forecaster


@pytest.mark.parametrize("name", FORECASTERS)
def test_every_forecaster_is_made_by_name_and_gated(name: str) -> None:
    made = make_forecaster(name)
    if name == "last":
        assert isinstance(made, Last)
    else:
        assert isinstance(made, Gated)
        assert type(made.inner) is FORECASTERS[name]


def test_options_reach_the_forecaster() -> None:
    made = make_forecaster("narx", {"delays": 3, "width": 4})
    assert isinstance(made, Gated)
    assert isinstance(made.inner, Narx)
    assert (made.inner.delays, made.inner.width) == (3, 4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nrax", {}, "forecaster: unknown name 'nrax'; did you mean narx?"),
        ("narx", {"delay": 3}, "unknown setting forecaster.delay; did you mean delays?"),
        ("ema", {"window": 3}, "unknown setting forecaster.window; did you mean one of alpha?"),
        ("last", {"alpha": 1}, "forecaster.alpha: last has no settings; remove it"),
        ("ema", {"alpha": "fast"}, 'forecaster.alpha: expected float, got "fast"'),
        ("ema", {"alpha": 1.5}, "forecaster.alpha: must lie in (0, 1], got 1.5"),
        ("narx", {"delays": 0}, "forecaster.delays: must be 1 or more, got 0"),
        ("lstm", {"width": 0}, "forecaster.width: must be 1 or more, got 0"),
        ("rnn", {"seed": -1}, "forecaster.seed: must not be negative, got -1"),
        ("arima", {"p": 0, "q": 0}, "forecaster.p: p and q must be 0 or more, not both 0: 0, 0"),
    ],
)
def test_a_wrong_option_is_named_with_a_suggestion(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_forecaster(name, options)
    assert str(caught.value) == message


def test_an_unknown_option_is_an_unknown_setting() -> None:
    with pytest.raises(UnknownSettingError):
        make_forecaster("narx", {"delay": 3})


@pytest.mark.parametrize(("p", "q"), [(1, 0), (0, 1), (3, 2)])
def test_arima_takes_any_order(p: int, q: int) -> None:
    arima = Arima(p=p, q=q)
    arima.set_roster(["a"])
    for speed in (3.0, 4.0, 3.5, 5.0):
        arima.learn(np.array([speed]), np.ones((1, 2)))
    assert 1 < arima.forecast(np.ones((1, 2)))[0] < 10


def test_ema_weighs_the_newest_speed_by_alpha() -> None:
    ema = Ema(alpha=0.25)
    ema.set_roster(["a"])
    ema.learn(np.array([8.0]), np.ones((1, 2)))
    ema.learn(np.array([16.0]), np.ones((1, 2)))
    assert ema.forecast(np.ones((1, 2))) == [10.0]


def test_a_roster_that_names_a_worker_twice_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="twice"):
        Last().set_roster(["a", "a"])


@pytest.mark.parametrize("name", FORECASTERS)
def test_columns_that_do_not_fit_the_roster_are_refused(name: str) -> None:
    forecaster = make_forecaster(name)
    forecaster.set_roster(["a", "b"])
    with pytest.raises(
        InvalidInputError, match=r"speed: has shape \(3,\), the roster needs \(2,\)"
    ):
        forecaster.learn(np.ones(3), np.ones((2, 2)))
    with pytest.raises(InvalidInputError, match="outlook: has shape"):
        forecaster.learn(np.ones(2), np.ones((3, 2)))
    with pytest.raises(InvalidInputError, match="outlook: has shape"):
        forecaster.forecast(np.ones(2))
    assert np.isnan(forecaster.forecast(np.ones((2, 2)))).all()


@pytest.mark.parametrize("gated", [False, True])
def test_a_state_with_other_settings_is_refused_and_changes_nothing(gated: bool) -> None:
    small: Lstm | Gated = Gated(inner=Lstm(width=2)) if gated else Lstm(width=2)
    large: Lstm | Gated = Gated(inner=Lstm(width=3)) if gated else Lstm(width=3)
    small.set_roster(["a"])
    large.set_roster(["b"])
    with pytest.raises(InvalidInputError, match="load it with the settings it was saved with"):
        large.load_state_dict(small.state_dict())
    assert large.state_dict()["workers"] == ["b"]


@pytest.mark.parametrize("name", FORECASTERS)
def test_an_empty_roster_is_a_roster(name: str) -> None:
    forecaster, restored = make_forecaster(name), make_forecaster(name)
    restored.load_state_dict(forecaster.state_dict())  # before the first roster
    for one in (forecaster, restored):
        one.set_roster([])
        one.learn(np.ones(0), np.ones((0, 2)))
        assert one.forecast(np.ones((0, 2))).shape == (0,)
    restored.load_state_dict(forecaster.state_dict())
