"""The shares of the workers, stacked up to the batch."""

from __future__ import annotations

import numpy as np

from evenstep.observe.history import History
from evenstep.observe.pictures.choose import colour, foremost, window
from evenstep.observe.pictures.layers import band
from evenstep.observe.pictures.plot import Key, Layer, Plot, Series, View


def shares(history: History, view: View) -> Plot | None:
    """None without steps."""
    steps = window(history, view)
    if not len(steps):
        return None
    shown, rest = foremost(steps.share)
    bottom = np.zeros(len(steps))
    layers: list[Layer] = []
    keys: list[Key] = []
    series: list[Series] = []
    parts = [(steps.workers[i], f"f{colour(history, steps.workers[i])}", [i]) for i in shown]
    if rest:
        parts.append((f"{len(rest)} others", "f-rest", rest))
    for name, cls, rows in parts:
        share = np.nansum(steps.share[:, rows], axis=1, dtype=float)
        worker = name if rows is not rest else ""
        layers.append(band(steps, bottom, bottom + share, f"{cls} band", title=name, worker=worker))
        keys.append(Key(cls=cls, text=name, shape="box"))
        series.append(Series(name=name, at_s=steps.at_s, values=share, unit="samples", cls=cls))
        bottom = bottom + share
    return Plot(
        layers=layers,
        top=float(bottom.max()) or 1.0,
        unit="samples",
        keys=keys,
        note=f"the {len(shown)} largest shares one by one" if rest else "",
        decisions=history.decisions.between(view.begin_s, view.end_s),
        series=series,
    )
