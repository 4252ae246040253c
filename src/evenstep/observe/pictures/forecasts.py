"""Each worker's speed as it was forecast, against the one that came."""

from __future__ import annotations

import numpy as np

from evenstep.observe.history import History
from evenstep.observe.pictures.choose import colour, foremost, window
from evenstep.observe.pictures.layers import Row, line
from evenstep.observe.pictures.plot import Key, Layer, Plot, Series, View
from evenstep.observe.pictures.step_time import rules

HEIGHT = 40.0
MAX_ROWS = 8


def forecasts(history: History, view: View) -> Plot | None:
    """None if nothing was forecast, or what came is not in the journal."""
    steps = window(history, view)
    known = np.isfinite(steps.forecast) & np.isfinite(steps.pace)
    if not known.any():
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(known, np.abs(steps.forecast / steps.pace - 1), np.nan)
    shown, rest = foremost(error, MAX_ROWS)
    shown = [i for i in shown if known[:, i].any()]
    layers: list[Layer] = []
    series: list[Series] = []
    for n, i in enumerate(shown):
        worker = steps.workers[i]
        came, foreseen = steps.pace[:, i].astype(float), steps.forecast[:, i].astype(float)
        top = 1.15 * float(np.nanpercentile(came, 98))
        row = Row(y=(n + 1) * HEIGHT - 3, height=HEIGHT - 7, top=top)
        cls = f"s{colour(history, worker)}"
        layers += [
            rules(row),
            line(steps, came, cls, row),
            line(steps, foreseen, "s-ink thin dots", row),
        ]
        series += [
            Series(name=f"{worker} came", at_s=steps.at_s, values=came, unit="samples/s", cls=cls),
            Series(name=f"{worker} forecast", at_s=steps.at_s, values=foreseen, unit="samples/s"),
        ]
    return Plot(
        layers=layers,
        height=HEIGHT * len(shown),
        rows=[(steps.workers[i], f"±{np.nanmedian(error[:, i]):.1%}") for i in shown],
        keys=[
            Key(cls=f"s{colour(history, steps.workers[shown[0]])}", text="speed that came"),
            Key(cls="s-ink thin dots", text="forecast; ±: its median error"),
        ],
        note=f"the {len(shown)} workers that were forecast worst" if rest else "",
        series=series,
    )
