"""The global batch, the learning rate that belongs to it, and the gradient noise scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan, sqrt
from sys import maxsize

import numpy as np

from evenstep.config import BatchSettings
from evenstep.errors import ConfigError, InvalidInputError, nearest

RULES = ("linear", "sqrt", "adascale", "none")
MIN_NOISE_WEIGHT = 0.4  # weight of a noise estimate after ten steps; below it is not used


def global_batch(settings: BatchSettings, num_workers: int) -> int:
    """The batch for `num_workers`: the fixed size, or `per_worker` for each up to the limit."""
    if settings.size > 0:
        return settings.size
    return min(settings.per_worker * num_workers, settings.limit)


def max_workers(settings: BatchSettings) -> int:
    """How many workers the largest batch can give `min_share` samples each."""
    largest = settings.size or settings.limit
    return largest // settings.min_share if settings.min_share else maxsize


def base_batch(settings: BatchSettings) -> int:
    """The batch that the user's learning rate is tuned for: the fixed one, or one worker's."""
    return global_batch(settings, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """Signal and noise in the gradient: of one step, or EWMAs over steps.

    The EWMAs are debiased by their weight, which decays like the sums; `GradientNoise()` is empty.
    A single step's signal may be negative: clipping it would bias the mean.
    """

    signal: float = 0.0  # |G|^2 of the true gradient, times weight
    noise: float = 0.0  # trace of the covariance of one sample's gradient, times weight
    weight: float = 0.0

    @property
    def scale(self) -> float:
        """Noise over signal: the batch at which both are equal. Infinite without signal."""
        if self.weight == 0:
            return nan
        if self.noise <= 0:
            return 0.0
        return self.noise / self.signal if self.signal > 0 else inf

    @property
    def known_scale(self) -> float:
        """The scale once enough steps were measured and signal was seen; 0 before."""
        return self.scale if self.weight >= MIN_NOISE_WEIGHT and self.signal > 0 else 0.0


def observe_noise(
    memory: GradientNoise, step: GradientNoise | None, *, alpha: float = 0.05
) -> GradientNoise:
    """Update the EWMAs with one step's estimate, if it has one."""
    if step is None:
        return memory
    return GradientNoise(
        signal=(1 - alpha) * memory.signal + alpha * step.signal,
        noise=(1 - alpha) * memory.noise + alpha * step.noise,
        weight=(1 - alpha) * memory.weight + alpha * step.weight,
    )


def step_noise(
    shares: Sequence[int], squared_norms: Sequence[float], mean_squared_norm: float
) -> GradientNoise | None:
    """Unbiased signal and noise of one step, for even or uneven shares.

    `squared_norms` are |g_i|^2 of each worker's mean gradient over its share, `mean_squared_norm`
    is |g|^2 of their share-weighted mean. Each pair (g_i, g) gives an unbiased estimate; weighting
    the pairs by B - b_i gives this closed form. Workers without a share are left out. None if fewer
    than two remain, which cannot separate signal from noise.
    """
    if len(shares) != len(squared_norms):
        raise InvalidInputError(
            "squared_norms", f"expected {len(shares)}, one per share, got {len(squared_norms)}"
        )
    has_share = np.asarray(shares, dtype=np.float64) > 0
    b = np.asarray(shares, dtype=np.float64)[has_share]
    squared = np.asarray(squared_norms, dtype=np.float64)[has_share]
    n, batch = len(b), float(b.sum())
    # Gradients may overflow under loss scaling.
    if n < 2 or not np.isfinite([*squared, mean_squared_norm]).all():
        return None
    weighted = float(b @ squared)
    return GradientNoise(
        signal=(n * mean_squared_norm - weighted / batch) / (n - 1),
        noise=(weighted - batch * mean_squared_norm) / (n - 1),
        weight=1.0,
    )


def lr_factor(
    rule: str, batch: int, base: int, noise: GradientNoise | None = None
) -> tuple[float, str]:
    """The factor on the learning rate at `batch`, relative to that at `base`, and why."""
    check_rule(rule)
    scale = batch / base
    why = f"batch {batch} is {scale:.3g} times the base batch of {base}"
    if rule == "linear":
        factor = scale
    elif rule == "sqrt":
        factor = sqrt(scale)
    elif rule == "adascale":
        if noise is None or noise.weight < MIN_NOISE_WEIGHT:
            return 1.0, f"{why}: learning rate unchanged (adascale has no noise estimate yet)"
        factor = adascale_gain(noise, scale, base)
        why += f" and the noise scale is {noise.scale:.4g}"
    else:
        factor = 1.0
    return factor, f"{why}: learning rate x {factor:.3g} ({rule})"


def adascale_gain(noise: GradientNoise, scale: float, base: int) -> float:
    """AdaScale's gain r = (v + m) / (v / s + m) for a batch `scale` times the base.

    v is the variance of the gradient at the base batch, m its squared mean. The gain lies between
    1 (all signal: more samples add nothing) and `scale` (all noise).
    """
    variance, squared_mean = max(noise.noise, 0.0) / base, max(noise.signal, 0.0)
    if variance + squared_mean == 0:
        return 1.0
    return (variance + squared_mean) / (variance / scale + squared_mean)


def check_rule(rule: str) -> None:
    """Raise on an unknown learning-rate rule, suggesting the nearest one."""
    if rule not in RULES:
        near = nearest(rule, RULES)
        hint = f"did you mean {near}?" if near else f"known: {', '.join(RULES)}"
        raise ConfigError("batch.lr_rule", f"unknown name {rule!r}; {hint}")
