from __future__ import annotations

import numpy as np
import pytest

from evenstep.predict import kalman
from evenstep.predict.kalman import Block, correct, covariance


def test_the_filter_equals_least_squares_on_all_of_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kalman, "FORGETTING", 0.0)
    rng = np.random.default_rng(0)
    truth, prior, noise = np.array([0.5, -1.0, 0.2]), np.array([0.3, 1.0, 0.1]), 0.04
    inputs = rng.normal(size=(50, 3))
    targets = inputs @ truth + 0.1 * rng.normal(size=50)
    block = Block(np.zeros((3, 1)), covariance(prior, (1,)), prior)
    for x, y in zip(inputs, targets, strict=True):
        error = y - x @ block.weights[:, 0]
        correct([block], [x[:, None]], np.array([error]), np.array([noise]), np.array([True]))
    exact = np.linalg.solve(
        inputs.T @ inputs / noise + np.diag(1 / prior), inputs.T @ targets / noise
    )
    np.testing.assert_allclose(block.weights[:, 0], exact, rtol=1e-9)


def test_an_outlier_counts_as_three_standard_deviations() -> None:
    def after(error: float) -> float:
        prior = np.array([1.0])
        block = Block(np.zeros((1, 1)), covariance(prior, (1,)), prior)
        noise = np.array([1.0])
        correct([block], [np.ones((1, 1))], np.array([error]), noise, np.array([True]))
        return float(block.weights[0, 0])

    limit = 3 * np.sqrt(2)
    assert after(limit / 2) < after(limit) == after(1000.0)


def test_uncertainty_never_outgrows_the_prior() -> None:
    prior = np.array([0.3, 0.3])
    block = Block(np.zeros((2, 1)), covariance(prior, (1,)), prior)
    for _ in range(10_000):  # the second weight is never needed
        x, error = np.array([[1.0], [0.0]]), np.array([0.1])
        correct([block], [x], error, np.array([0.01]), np.array([True]))
    assert 0 < block.covariance[0, 0, 0] < 0.01
    assert block.covariance[1, 1, 0] == pytest.approx(0.3)


def test_blocks_are_learned_by_node_and_idle_workers_are_left_alone() -> None:
    rng = np.random.default_rng(1)
    prior = np.full(2, 0.3)
    block = Block(rng.normal(size=(2, 4, 3)), covariance(prior, (4, 3)), prior)
    slope, noise = rng.normal(size=(2, 4, 3)), np.full(3, 0.1)
    correct([block], [slope], np.full(3, 0.2), noise, np.full(3, True))
    weights, spread = block.weights.copy(), block.covariance.copy()
    learns, error = np.array([True, False, True]), np.array([0.5, np.nan, -0.5])
    correct([block], [slope], error, noise, learns)
    assert (block.weights[..., 1] == weights[..., 1]).all()
    assert (block.covariance[..., 1] == spread[..., 1]).all()
    assert (block.weights[..., 0] != weights[..., 0]).all()
