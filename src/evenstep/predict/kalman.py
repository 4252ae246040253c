"""Weights learned online by an extended Kalman filter, which needs far fewer steps than SGD.

Weights come in blocks. The filter tracks the covariance within a block and neglects it between
blocks (the decoupled extended Kalman filter of Puskorius and Feldkamp), so the cost of a net is the
sum over its nodes. The last axis of all arrays is the worker; each worker has its own filter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from evenstep.types import FloatArray

FORGETTING = 0.002  # per step: the filter forgets over about 500 steps
OUTLIER = 3.0  # standard deviations; larger errors are clipped


@dataclass(frozen=True, slots=True)
class Block:
    """Weights `[input, ..., worker]` and their covariance `[input, input, ..., worker]`."""

    weights: FloatArray
    covariance: FloatArray
    prior: FloatArray  # initial variance of each input's weight


def dot(a: FloatArray, b: FloatArray) -> FloatArray:
    """Sum of products over the first axis.

    Summed in a fixed order: NumPy's own sum would round differently for a roster of one.
    """
    products = a * b.reshape(len(b), *(1,) * (a.ndim - b.ndim), *b.shape[1:])
    total: FloatArray = products[0]
    for product in products[1:]:
        total = total + product
    return total


def covariance(prior: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """The initial covariance of weights of shape `[len(prior), *shape]`."""
    diagonal = np.zeros((len(prior), len(prior), *shape))
    for i, variance in enumerate(prior):
        diagonal[i, i] = variance
    return diagonal


def correct(
    blocks: Sequence[Block],
    slopes: Sequence[FloatArray],
    error: FloatArray,
    noise: FloatArray,
    learns: NDArray[np.bool_],
) -> None:
    """Correct the weights in place by `error`; workers that do not learn stay bit-identical.

    `slopes` are the derivatives of the forecast by the weights, `noise` is the observation noise
    variance.
    """
    cross = [dot(b.covariance, s) for b, s in zip(blocks, slopes, strict=True)]
    error_var = noise.copy()  # innovation variance
    for c, s in zip(cross, slopes, strict=True):
        flat = (prod(c.shape[:-1]), c.shape[-1])
        error_var += dot(c.reshape(flat), s.reshape(flat))
    bound = OUTLIER * np.sqrt(error_var)
    scaled_error = np.where(learns, np.clip(error, -bound, bound) / error_var, 0.0)
    precision = np.where(learns, 1 / error_var, 0.0)
    forgetting = np.where(learns, FORGETTING, 0.0)
    for block, c in zip(blocks, cross, strict=True):
        block.weights[...] += c * scaled_error
        block.covariance[...] -= c[:, None] * (c * precision)
        diagonal = np.arange(len(c)), np.arange(len(c))
        prior, variance = block.prior.reshape(-1, *(1,) * (c.ndim - 1)), block.covariance[diagonal]
        block.covariance[diagonal] = variance + forgetting * (prior - variance)
