"""The global batch, what it does to the learning rate, and what a larger one is still worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan, sqrt
from sys import maxsize

import numpy as np

from evenstep.config import BatchSettings
from evenstep.errors import ConfigError, InvalidInputError, nearest

RULES = ("linear", "sqrt", "adascale", "none")
SURE = 0.4  # the weight that an estimate of the noise has after ten steps


def global_batch(settings: BatchSettings, num_workers: int) -> int:
    """The batch of `num_workers`: the fixed size, or so much for each up to the limit."""
    if settings.size > 0:
        return settings.size
    return min(settings.per_worker * num_workers, settings.limit)


def most_workers(settings: BatchSettings) -> int:
    """Among how many the largest batch can be shared, with `min_share` samples for each."""
    largest = settings.size or settings.limit
    return largest // settings.min_share if settings.min_share else maxsize


def base_batch(settings: BatchSettings) -> int:
    """The batch that the user's learning rate belongs to: that of one worker, or the fixed one."""
    return global_batch(settings, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """Signal and noise in the gradient. `GradientNoise()` has seen nothing.

    As memory it holds exponential means over steps, which are those of the steps seen so far from
    the first on: numerator and weight decay alike. One step may estimate a signal below zero: only
    so are the means unbiased.
    """

    signal: float = 0.0  # |G|^2 of the true gradient, times weight
    noise: float = 0.0  # trace of the covariance of one sample's gradient, times weight
    weight: float = 0.0

    @property
    def scale(self) -> float:
        """Noise over signal: the batch at which both weigh the same. Infinite without signal."""
        if self.weight == 0:
            return nan
        if self.noise <= 0:
            return 0.0
        return self.noise / self.signal if self.signal > 0 else inf


def observe_noise(
    memory: GradientNoise, step: GradientNoise | None, *, alpha: float = 0.05
) -> GradientNoise:
    """Fold in the estimate of one step. A step without one changes nothing."""
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
    """Unbiased signal and noise of one step, from shares that may be uneven.

    `squared_norms` are |g_i|^2 of each worker's mean gradient over its share, `mean_squared_norm`
    |g|^2 of their share-weighted mean. Each pair (g_i, g) gives an unbiased estimate; weighting
    them by B - b_i gives this closed form. Workers without a share have no gradient and no say;
    fewer than two others cannot tell signal from noise, and the answer is None.
    """
    if len(shares) != len(squared_norms):
        raise InvalidInputError(
            "squared_norms", f"{len(squared_norms)} of them for {len(shares)} shares"
        )
    has_share = np.asarray(shares, dtype=np.float64) > 0
    b = np.asarray(shares, dtype=np.float64)[has_share]
    squared = np.asarray(squared_norms, dtype=np.float64)[has_share]
    n, batch = len(b), float(b.sum())
    # A gradient that overflowed, as under loss scaling, says nothing of the noise.
    if n < 2 or not np.isfinite([*squared, mean_squared_norm]).all():
        return None
    weighted = float(b @ squared)
    return GradientNoise(
        signal=(n * mean_squared_norm - weighted / batch) / (n - 1),
        noise=(weighted - batch * mean_squared_norm) / (n - 1),
        weight=1.0,
    )


def batch_efficiency(noise_scale: float, batch: int, base: int) -> float:
    """Progress per sample at `batch` next to that at `base`: (scale + base) / (scale + batch)."""
    return 1.0 if noise_scale == inf else (noise_scale + base) / (noise_scale + batch)


def lr_factor(
    rule: str, batch: int, base: int, noise: GradientNoise | None = None
) -> tuple[float, str]:
    """What the learning rate that belongs to `base` is multiplied by at `batch`, and why."""
    check_rule(rule)
    scale = batch / base
    said = f"batch {batch} is {scale:.3g} times the base of {base}"
    if rule == "linear":
        factor = scale
    elif rule == "sqrt":
        factor = sqrt(scale)
    elif rule == "adascale":
        if noise is None or noise.weight < SURE:
            return 1.0, f"{said}: learning rate as it was (adascale, no gradient noise known yet)"
        factor = adascale_gain(noise, scale, base)
        said += f" and the noise scale {noise.scale:.4g}"
    else:
        factor = 1.0
    return factor, f"{said}: learning rate x {factor:.3g} ({rule})"


def adascale_gain(noise: GradientNoise, scale: float, base: int) -> float:
    """AdaScale's gain r = (v + m) / (v / s + m) for a batch `scale` times the base.

    v is the variance of the gradient at the base batch, m its squared mean. The gain lies between
    1 (all signal: more samples say nothing new) and `scale` (all noise).
    """
    variance, squared_mean = max(noise.noise, 0.0) / base, max(noise.signal, 0.0)
    if variance + squared_mean == 0:
        return 1.0
    return (variance + squared_mean) / (variance / scale + squared_mean)


def check_rule(rule: str) -> None:
    """Refuse a learning-rate rule that does not exist, with the one perhaps meant."""
    if rule not in RULES:
        near = nearest(rule, RULES)
        hint = f"did you mean {near}?" if near else f"known: {', '.join(RULES)}"
        raise ConfigError("batch.lr_rule", f"unknown name {rule!r}; {hint}")
