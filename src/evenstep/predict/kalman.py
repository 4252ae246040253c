"""Weights learned online by a Kalman filter: one step teaches what gradient descent needs many for.

Weights come in blocks. Within a block the filter knows how the errors of the weights hang together;
between blocks it assumes they do not (the decoupled extended Kalman filter of Puskorius and
Feldkamp), which makes a net as cheap as its nodes. All arrays end with the axis of workers, and
each worker has a filter of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from evenstep.types import FloatArray

FORGETTING = 0.002  # of what is known, per step: 500 steps ago it was another worker
OUTLIER = 3.0  # standard deviations; what lies beyond teaches no more than what lies at them


@dataclass(frozen=True, slots=True)
class Block:
    """Weights `[input, ..., worker]`, their covariance `[input, input, ..., worker]`, its start."""

    weights: FloatArray
    covariance: FloatArray
    prior: FloatArray  # variance of each input's weight before anything is learned


def dot(a: FloatArray, b: FloatArray) -> FloatArray:
    """Sum of products over the first axis.

    Always in the same order: NumPy's own sums would round differently for a roster of one.
    """
    products = a * b.reshape(len(b), *(1,) * (a.ndim - b.ndim), *b.shape[1:])
    total: FloatArray = products[0]
    for product in products[1:]:
        total = total + product
    return total


def covariance(prior: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """The covariance before anything is learned, for weights of `[len(prior), *shape]`."""
    start = np.zeros((len(prior), len(prior), *shape))
    for i, variance in enumerate(prior):
        start[i, i] = variance
    return start


def correct(
    blocks: Sequence[Block],
    slopes: Sequence[FloatArray],
    error: FloatArray,
    noise: FloatArray,
    learns: NDArray[np.bool_],
) -> None:
    """Move the weights, in place, to explain `error`; workers that do not learn stay bit-equal.

    `slopes` are the derivatives of the forecast by the weights, `noise` is the variance that no
    weights would explain.
    """
    reach = [dot(b.covariance, s) for b, s in zip(blocks, slopes, strict=True)]
    expected = noise.copy()
    for r, s in zip(reach, slopes, strict=True):
        flat = (prod(r.shape[:-1]), r.shape[-1])
        expected += dot(r.reshape(flat), s.reshape(flat))
    bound = OUTLIER * np.sqrt(expected)
    gain = np.where(learns, np.clip(error, -bound, bound) / expected, 0.0)
    known = np.where(learns, 1 / expected, 0.0)
    forgotten = np.where(learns, FORGETTING, 0.0)
    for block, r in zip(blocks, reach, strict=True):
        block.weights[...] += r * gain
        block.covariance[...] -= r[:, None] * (r * known)
        own = np.arange(len(r)), np.arange(len(r))
        prior, variance = block.prior.reshape(-1, *(1,) * (r.ndim - 1)), block.covariance[own]
        block.covariance[own] = variance + forgotten * (prior - variance)
