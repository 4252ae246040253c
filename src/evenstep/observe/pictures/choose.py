"""Which workers a picture shows one by one, in which colours, and over what time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenstep.observe.history import History, RunWindow
from evenstep.observe.pictures.plot import View
from evenstep.observe.pictures.theme import NUM_COLOURS
from evenstep.types import WorkerId

MAX_WORKERS = 12
"""Workers shown one by one; the others together."""


def window(history: History, view: View) -> RunWindow:
    """The steps of a view."""
    return history.between(view.begin_s, view.end_s, view.points)


def colour(history: History, worker: WorkerId) -> int:
    """The number of a worker's colour: the same in all pictures of a run, at any zoom."""
    return history.order.get(worker, 0) % NUM_COLOURS


def foremost(values: NDArray[np.floating], most: int = MAX_WORKERS) -> tuple[list[int], list[int]]:
    """The workers with the largest totals of a table [point, worker], and the others."""
    num = values.shape[1]
    if num <= most:
        return list(range(num)), []
    totals = np.nansum(values, axis=0, dtype=float)
    chosen = sorted(np.argsort(-totals, kind="stable")[: most - 1].tolist())
    return chosen, sorted(set(range(num)) - set(chosen))


def robust_top(values: NDArray[np.floating]) -> tuple[float, float]:
    """An upper end for a scale, and the largest value if it is far beyond."""
    known = values[np.isfinite(values)]
    if not len(known):
        return 1.0, 0.0
    usual, largest = float(np.percentile(known, 97)), float(known.max())
    if largest <= 2.0 * usual or usual <= 0:
        return (1.05 * largest or 1.0), 0.0
    return 1.4 * usual, largest


def beyond(largest: float, text: str) -> str:
    """A note on what a scale leaves out."""
    return f"cut off above: up to {text}" if largest else ""
