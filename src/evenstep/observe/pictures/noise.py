"""The gradient noise scale, beside the batch."""

from __future__ import annotations

from math import ceil, floor, log10

import numpy as np

from evenstep.observe.history import History
from evenstep.observe.pictures.choose import window
from evenstep.observe.pictures.layers import line
from evenstep.observe.pictures.plot import Key, Plot, Series, View


def gradient_noise(history: History, view: View) -> Plot | None:
    """None if gradient norms were not measured."""
    steps = window(history, view)
    scale = steps.noise_scale
    if not len(steps) or not np.isfinite(scale).any():
        return None
    both = np.concatenate([scale[np.isfinite(scale)], steps.batch[steps.batch > 0]])
    return Plot(
        layers=[line(steps, steps.batch, "s-soft dash"), line(steps, scale, "s-main")],
        top=10.0 ** max(ceil(log10(both.max())), floor(log10(both.min())) + 1),
        bottom=10.0 ** floor(log10(both.min())),
        is_log=True,
        unit="samples",
        keys=[
            Key(cls="s-main", text="gradient noise scale"),
            Key(cls="s-soft dash", text="batch"),
        ],
        note="larger batches pay off while the batch is below the noise scale",
        series=[
            Series(name="noise scale", at_s=steps.at_s, values=scale, unit="samples", cls="s-main"),
            Series(name="batch", at_s=steps.at_s, values=steps.batch, unit="samples", cls="s-soft"),
        ],
    )
