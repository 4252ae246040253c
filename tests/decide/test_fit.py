"""Fitted curves: exact where the points determine them, cautious where they do not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from evenstep.decide.fit import fit
from evenstep.errors import InvalidInputError
from evenstep.types import FloatArray
from tests.hypothesis_examples import examples


def row(*values: float) -> FloatArray:
    return np.array([values], dtype=np.float64)


def ones(column: FloatArray) -> FloatArray:
    return np.ones_like(column)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[float, float, float, list[float], list[float]]:
    floor, flat_part = draw(st.floats(1e-3, 10)), draw(st.floats(0.0, 0.9))
    knee = draw(st.floats(2, 1000))
    fixed = floor * flat_part
    below = draw(st.lists(st.floats(0.1, 0.9), min_size=1, max_size=4))
    beyond = draw(st.lists(st.integers(2, 40), min_size=2, max_size=4, unique=True))
    return (
        floor,
        fixed,
        (floor - fixed) / knee,
        [knee * f for f in below],
        [knee * f for f in beyond],
    )


@given(shapes())
def test_points_without_noise_give_the_curve_exactly(
    shape: tuple[float, float, float, list[float], list[float]],
) -> None:
    floor, fixed, slope, below, beyond = shape
    shares = row(*below, *beyond)
    curve = fit(shares, np.maximum(floor, fixed + slope * shares), ones(shares))
    assert curve.floor_s[0] == pytest.approx(floor, rel=1e-6)
    assert curve.fixed_s[0] == pytest.approx(fixed, rel=1e-6, abs=1e-6 * floor)
    assert curve.per_sample_s[0] == pytest.approx(slope, rel=1e-6)


@given(st.floats(0, 1), st.floats(1e-4, 1), st.lists(st.integers(1, 500), min_size=2, unique=True))
def test_a_line_has_no_flat_part(fixed: float, slope: float, sizes: list[int]) -> None:
    shares = row(*sizes)
    curve = fit(shares, fixed + slope * shares, ones(shares))
    assert curve.floor_s[0] == 0
    assert curve.fixed_s[0] == pytest.approx(fixed, abs=1e-7 * (fixed + slope * max(sizes)))
    assert curve.per_sample_s[0] == pytest.approx(slope, rel=1e-6)


def test_one_share_gives_a_line_with_the_prior_fixed_fraction() -> None:
    curve = fit(row(10, 10), row(1.0, 3.0), row(1, 1), fixed_fraction=0.25)
    assert curve.floor_s[0] == 0
    assert curve.fixed_s[0] == pytest.approx(0.5)
    assert curve.per_sample_s[0] == pytest.approx(0.15)


def test_beyond_the_largest_flat_point_samples_cost_time() -> None:
    shares = row(4, 8, 16)
    curve = fit(shares, row(2, 2, 2), ones(shares))
    assert curve.seconds(np.array([16])) == pytest.approx([2.0])
    assert curve.seconds(np.array([32])) == pytest.approx([4.0])


@examples(200)
@given(
    st.lists(
        st.tuples(st.integers(1, 100), st.floats(1e-3, 10), st.floats(0.1, 5)),
        min_size=1,
        max_size=8,
    )
)
def test_no_line_fits_better_and_every_sample_costs(
    points: list[tuple[int, float, float]],
) -> None:
    b, t, w = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    curve = fit(b[None], t[None], w[None])
    assert curve.per_sample_s[0] > 0
    assert curve.fixed_s[0] >= 0
    at_points = np.maximum(curve.floor_s, curve.fixed_s + curve.per_sample_s * b)
    error = float((w * (at_points - t) ** 2).sum())
    root = np.sqrt(w)
    _, residual = nnls(np.stack([root, root * b], axis=1), root * t)
    assert error <= residual**2 * (1 + 1e-6) + 1e-9


def test_a_fit_is_independent_of_other_workers_empty_slots_and_order() -> None:
    shares, seconds = row(4, 8, 16, 32, 0), row(2, 2, 3, 5, np.nan)
    weight = row(1, 1, 1, 1, 0)
    alone = fit(shares, seconds, weight)
    shuffled = [3, 4, 0, 2, 1]
    other = row(1, 2, 3, 4, 5)
    both = fit(
        np.concatenate([other, shares[:, shuffled]]),
        np.concatenate([other, seconds[:, shuffled]]),
        np.concatenate([ones(other), weight[:, shuffled]]),
    )
    for name in ("floor_s", "fixed_s", "per_sample_s"):
        assert getattr(both, name)[1] == pytest.approx(getattr(alone, name)[0])
    assert both.per_sample_s[0] == pytest.approx(1.0)


def test_a_weight_of_two_equals_a_duplicate_point() -> None:
    once = fit(row(1, 2, 3), row(1, 3, 3), row(1, 2, 1))
    twice = fit(row(1, 2, 2, 3), row(1, 3, 3, 3), row(1, 1, 1, 1))
    assert once.per_sample_s == pytest.approx(twice.per_sample_s)
    assert once.fixed_s == pytest.approx(twice.fixed_s)


def test_a_prior_keeps_the_fixed_part_when_points_are_close_together() -> None:
    shares, seconds = row(100, 101), row(1.0, 1.02)  # a plain fit would put the fixed cost at zero
    free = fit(shares, seconds, ones(shares), fixed_fraction=0.5)
    held = fit(shares, seconds, ones(shares), fixed_fraction=0.5, prior_weight=1.0)
    assert free.fixed_s[0] == 0
    assert held.fixed_s[0] == pytest.approx(0.5, rel=0.05)


def test_a_knee_must_save_more_than_its_penalty() -> None:
    shares, seconds = row(1, 10, 20, 30), row(1.15, 2.0, 3.0, 4.0)
    assert fit(shares, seconds, ones(shares)).floor_s[0] > 0
    assert fit(shares, seconds, ones(shares), knee_penalty=0.1).floor_s[0] == 0


def test_a_worker_without_points_is_named() -> None:
    with pytest.raises(InvalidInputError, match="curve 1"):
        fit(np.ones((2, 3)), np.ones((2, 3)), np.array([[1.0, 0, 0], [0, 0, 0]]))
