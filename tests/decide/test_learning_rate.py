"""The global batch, the learning rate that follows it, and the gradient noise of uneven shares."""

from __future__ import annotations

from math import inf, isnan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.config import BatchSettings
from evenstep.decide.learning_rate import (
    RULES,
    GradientNoise,
    adascale_gain,
    base_batch,
    check_rule,
    global_batch,
    lr_factor,
    observe_noise,
    step_noise,
)
from evenstep.errors import ConfigError, InvalidInputError


def noise(signal: float, noise: float) -> GradientNoise:
    return GradientNoise(signal=signal, noise=noise, weight=1.0)


def test_a_fixed_batch_does_not_depend_on_the_number_of_workers() -> None:
    assert [global_batch(BatchSettings(size=100), k) for k in (1, 7)] == [100, 100]
    assert base_batch(BatchSettings(size=100)) == 100


def test_a_growing_batch_stops_at_its_limit() -> None:
    settings = BatchSettings(per_worker=256, limit=1000)
    assert [global_batch(settings, k) for k in (1, 2, 3, 4, 40)] == [256, 512, 768, 1000, 1000]
    assert base_batch(settings) == 256


def test_each_rule_scales_the_learning_rate_its_own_way() -> None:
    known = noise(signal=1.0, noise=128.0)  # at the base batch the variance equals the signal
    assert [lr_factor(rule, 512, 128, known)[0] for rule in RULES] == [4, 2, 2 / 1.25, 1]


def test_the_reason_names_the_figures() -> None:
    assert lr_factor("sqrt", 512, 128)[1] == (
        "batch 512 is 4 times the base batch of 128: learning rate x 2 (sqrt)"
    )
    assert lr_factor("adascale", 512, 128, noise(1.0, 128.0))[1] == (
        "batch 512 is 4 times the base batch of 128 and the noise scale is 128:"
        " learning rate x 1.6 (adascale)"
    )


def test_adascale_waits_for_an_estimate() -> None:
    for known in (None, GradientNoise()):
        factor, reason = lr_factor("adascale", 512, 128, known)
        assert factor == 1.0
        assert "no noise estimate yet" in reason


def test_an_unknown_rule_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"batch\.lr_rule: unknown name 'liner'; did you mean"):
        lr_factor("liner", 2, 1)
    with pytest.raises(ConfigError, match="known: linear, sqrt, adascale, none"):
        check_rule("zzz")


def test_all_noise_gains_the_whole_scale_and_all_signal_nothing() -> None:
    assert adascale_gain(noise(0.0, 5.0), 8.0, 32) == pytest.approx(8.0)
    assert adascale_gain(noise(5.0, 0.0), 8.0, 32) == 1.0
    assert adascale_gain(noise(-0.1, 5.0), 8.0, 32) == pytest.approx(8.0)
    assert adascale_gain(noise(-0.1, -0.1), 8.0, 32) == 1.0


@given(
    st.floats(0.0, 1e6),
    st.floats(0.0, 1e6),
    st.floats(0.05, 100.0),
    st.integers(1, 10_000),
)
def test_the_gain_lies_between_one_and_the_scale(
    signal: float, variance: float, scale: float, base: int
) -> None:
    gain = adascale_gain(noise(signal, variance), scale, base)
    low, high = sorted((1.0, scale))
    assert low * (1 - 1e-9) <= gain <= high * (1 + 1e-9)


def draw_norms(
    shares: tuple[int, ...], draws: int, seed: int
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Squared norms of workers' gradients and of their mean, and the true values."""
    rng = np.random.default_rng(seed)
    mean = np.array([0.5, -0.2, 0.1, 0.0, 0.3])
    deviation = np.array([1.0, 2.0, 0.5, 3.0, 0.1])
    b = np.array(shares, dtype=float)
    # The mean over b samples of N(mean, deviation^2); a worker without a share sends zeros.
    spread = np.where(b > 0, 1 / np.sqrt(np.maximum(b, 1)), 0.0)
    g = mean + deviation * rng.normal(size=(draws, len(b), 5)) * spread[:, None]
    g[:, b == 0] = 0.0
    whole = np.einsum("i,dij->dj", b / b.sum(), g)
    return (
        (g**2).sum(axis=2),
        (whole**2).sum(axis=1),
        float(mean @ mean),
        float(deviation @ deviation),
    )


@pytest.mark.parametrize("shares", [(71, 36, 18, 3), (64, 64), (100, 1), (40, 0, 7, 0, 5)])
def test_both_estimates_are_unbiased_for_uneven_shares(shares: tuple[int, ...]) -> None:
    norms, whole, signal, variance = draw_norms(shares, draws=20_000, seed=1)
    steps = [step_noise(shares, n, w) for n, w in zip(norms, whole, strict=True)]
    for name, truth in (("signal", signal), ("noise", variance)):
        got = np.array([getattr(s, name) for s in steps])
        error = got.std() / np.sqrt(len(got))
        assert abs(got.mean() - truth) < 4 * error
        assert 4 * error < 0.1 * truth, "the test could not tell a bias of a tenth"


def test_the_estimate_for_even_shares_would_be_biased_for_uneven_ones() -> None:
    """Checks the test above: it must detect the wrong formula."""
    norms, whole, _, variance = draw_norms((71, 36, 18, 3), draws=20_000, seed=1)
    got = (32 * norms.sum(axis=1) - 128 * whole) / 3
    assert abs(got.mean() - variance) > 20 * got.std() / np.sqrt(len(got))


def test_workers_without_a_share_are_ignored() -> None:
    assert step_noise((8, 0, 4), (1.0, 99.0, 2.0), 0.5) == step_noise((8, 4), (1.0, 2.0), 0.5)


def test_one_worker_cannot_tell_signal_from_noise() -> None:
    assert step_noise((8,), (1.0,), 1.0) is None
    assert step_noise((8, 0), (1.0, 0.0), 1.0) is None


@pytest.mark.parametrize("bad", [float("nan"), inf])
def test_an_overflowed_gradient_is_skipped(bad: float) -> None:
    assert step_noise((8, 8), (1.0, bad), 1.0) is None
    assert step_noise((8, 8), (1.0, 1.0), bad) is None


def test_norms_must_match_the_shares() -> None:
    with pytest.raises(InvalidInputError, match="expected 2, one per share, got 1"):
        step_noise((8, 8), (1.0,), 1.0)


def test_identical_gradients_have_no_noise_and_all_signal() -> None:
    found = step_noise((9, 3, 1), (4.0, 4.0, 4.0), 4.0)
    assert found is not None
    assert (found.signal, found.noise, found.scale) == (4.0, 0.0, 0.0)


def test_the_mean_over_steps_is_right_from_the_first_step_on() -> None:
    memory = observe_noise(GradientNoise(), noise(2.0, 6.0), alpha=0.1)
    assert memory.scale == pytest.approx(3.0)
    assert observe_noise(memory, None) is memory
    memory = observe_noise(memory, noise(4.0, 6.0), alpha=0.1)
    assert memory.signal / memory.weight == pytest.approx((0.9 * 2 + 4) / 1.9)
    for _ in range(200):
        memory = observe_noise(memory, noise(1.0, 50.0), alpha=0.1)
    assert memory.scale == pytest.approx(50.0)


def test_averaging_over_steps_finds_the_noise_scale() -> None:
    norms, whole, signal, variance = draw_norms((71, 36, 18, 3), draws=3000, seed=2)
    memory = GradientNoise()
    for n, w in zip(norms, whole, strict=True):
        memory = observe_noise(memory, step_noise((71, 36, 18, 3), n, w), alpha=0.01)
    assert memory.scale == pytest.approx(variance / signal, rel=0.15)


def test_without_signal_the_noise_scale_has_no_bound() -> None:
    assert noise(-0.1, 3.0).scale == inf
    assert isnan(GradientNoise().scale)


def test_a_noise_scale_is_known_after_enough_steps_with_a_signal() -> None:
    assert GradientNoise().known_scale == 0.0
    assert GradientNoise(signal=0.1, noise=8.0, weight=0.1).known_scale == 0.0
    assert GradientNoise(signal=-0.1, noise=8.0, weight=0.9).known_scale == 0.0
    assert GradientNoise(signal=0.5, noise=8.0, weight=0.9).known_scale == 16.0
