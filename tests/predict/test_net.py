from __future__ import annotations

import numpy as np
import pytest

from evenstep.predict import Lstm, Narx, Rnn
from evenstep.predict.net import Net
from evenstep.testing import forecasts, interference
from evenstep.types import FloatArray

TINY = 1e-6


@pytest.mark.parametrize("net", [Narx(), Rnn(), Lstm()])
def test_the_slopes_of_a_hidden_layer_are_its_derivatives(net: Net) -> None:
    rng = np.random.default_rng(0)
    drive, carry = rng.normal(size=(net.gates, 5, 3)), rng.normal(size=(5, 3))
    _, _, slopes = net._cell(drive, carry)
    for gate in range(net.gates):
        up, down = drive.copy(), drive.copy()
        up[gate] += TINY
        down[gate] -= TINY
        measured = (net._cell(up, carry)[0] - net._cell(down, carry)[0]) / (2 * TINY)
        np.testing.assert_allclose(slopes[gate], measured, atol=1e-8)


@pytest.mark.parametrize("delays", [1, 2, 4])
def test_the_slopes_of_narx_are_the_derivatives_of_its_forecast(delays: int) -> None:
    narx = Narx(delays=delays, width=2)
    narx.set_roster(["a", "b"])
    forecasts(narx, interference(steps=60, workers=2, seed=1))
    outlook = np.array([[0.3, 0.8], [0.9, 0.1]])
    prediction = narx._predict(outlook)
    for block, slope in zip(prediction.blocks, prediction.slopes, strict=True):
        for at in np.ndindex(block.weights.shape[:-1]):
            was = block.weights[at].copy()
            block.weights[at] = was + TINY
            above = narx._predict(outlook).change
            block.weights[at] = was - TINY
            below = narx._predict(outlook).change
            block.weights[at] = was
            np.testing.assert_allclose(slope[at], (above - below) / (2 * TINY), atol=1e-8)


def test_a_late_effect_is_seen_by_delays_and_by_recurrent_layers() -> None:
    speed, outlook = interference(steps=400, workers=16, seed=2)
    late = (speed[:-1], outlook[1:])  # a change of free CPU takes effect one step later

    def error(net: Net) -> float:
        net.set_roster([f"w{i}" for i in range(16)])
        predicted = forecasts(net, late)[200:]
        return float(np.sqrt(np.mean(np.log(predicted / late[0][200:]) ** 2)))

    blind = error(Narx(delays=1))
    assert error(Narx(delays=2)) < 0.6 * blind
    assert error(Rnn()) < 0.6 * blind
    assert error(Lstm()) < 0.8 * blind


def test_an_outlook_that_never_changed_teaches_nothing_about_it() -> None:
    narx = Narx(delays=3)
    narx.set_roster(["a"])
    for speed in (100.0, 120.0, 90.0, 130.0):
        narx.learn(np.array([speed]), np.array([[0.9, 0.2]]))
    assert (narx.state_dict()["outer"][:3] != 0).any()
    assert (narx.state_dict()["outer"][3:] == 0).all()


@pytest.mark.parametrize("make", [Narx, Rnn, Lstm])
def test_the_first_reported_outlook_is_not_a_change(make: type[Narx | Rnn | Lstm]) -> None:
    reported, late = make(), make()
    free = [0.4] * 20 + [0.8] * 5 + [0.4] * 5
    for net, unknown in ((reported, 0), (late, 5)):
        net.set_roster(["a"])
        for k, cpu in enumerate(free):
            outlook = np.array([[cpu if k >= unknown else np.nan, np.nan]])
            net.learn(np.array([1000 * cpu]), outlook)
    coming = np.array([[0.8, np.nan]])
    np.testing.assert_allclose(late.forecast(coming), reported.forecast(coming), rtol=0.02)
    assert late.forecast(coming)[0] == pytest.approx(800, rel=0.1)


def test_workers_start_from_weights_of_their_own_and_a_seed_changes_them() -> None:
    def first_weights(seed: int) -> tuple[FloatArray, FloatArray]:
        narx = Narx(seed=seed)
        narx.set_roster(["a", "b"])
        a, b = np.moveaxis(narx.state_dict()["inner"], -1, 0)
        return a, b

    a, b = first_weights(0)
    assert (a != b).any()
    assert (a == first_weights(0)[0]).all()
    assert (a != first_weights(1)[0]).any()


def test_a_changed_effect_of_free_cpu_is_relearned() -> None:
    speed, outlook = interference(steps=400, workers=16, seed=3)
    speed[:150] = speed[0]  # at first the others take CPU that this job does not need

    def error(steps: slice) -> float:
        narx = Narx()
        narx.set_roster([f"w{i}" for i in range(16)])
        predicted = forecasts(narx, (speed, outlook))[steps]
        return float(np.sqrt(np.mean(np.log(predicted / speed[steps]) ** 2)))

    assert error(slice(250, None)) < 0.08


@pytest.mark.parametrize("make", [Narx, Rnn, Lstm])
def test_an_untrained_net_forecasts_the_last_speed(make: type[Narx | Rnn | Lstm]) -> None:
    net = make()
    net.set_roster(["a"])
    net.learn(np.array([123.0]), np.array([[0.9, 0.2]]))
    assert net.forecast(np.array([[0.1, 0.7]])) == [123.0]
