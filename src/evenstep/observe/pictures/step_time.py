"""Each worker's time in a step: computing, and then waiting for the slowest."""

from __future__ import annotations

import numpy as np

from evenstep.observe.history import History
from evenstep.observe.pictures.choose import beyond, colour, foremost, robust_top, window
from evenstep.observe.pictures.layers import Row, band, line
from evenstep.observe.pictures.plot import Axes, Key, Layer, Plot, Series, View
from evenstep.observe.pictures.svg import Markup, element, number
from evenstep.observe.pictures.ticks import seconds
from evenstep.types import FloatArray

HEIGHT = 36.0


def step_time(history: History, view: View) -> Plot | None:
    """None without steps."""
    steps = window(history, view)
    if not len(steps):
        return None
    compute_s, wait_s = steps.compute_s.astype(float), steps.wait_s.astype(float)
    shown, rest = foremost(compute_s)
    top, largest = robust_top(compute_s + wait_s)
    if view.top is not None:
        top, largest = view.top, largest if largest > view.top else 0.0
    layers: list[Layer] = []
    series: list[Series] = []
    figures: list[str] = []
    parts = [(steps.workers[i], f"{colour(history, steps.workers[i])}", [i]) for i in shown]
    if rest:
        parts.append((f"{len(rest)} others", "-rest", rest))
    height = HEIGHT if len(parts) > 2 else 1.6 * HEIGHT
    for n, (name, cls, rows) in enumerate(parts):
        row = Row(y=(n + 1) * height - 3, height=height - 7, top=top)
        computing, waiting = _means(compute_s[:, rows]), _means(wait_s[:, rows])
        most = np.nan_to_num(steps.longest_compute_s[:, rows].astype(float)).max(axis=1)
        most[np.isnan(computing)] = np.nan
        ends = computing + waiting
        zero = np.zeros(len(steps))
        worker = name if rows is not rest else ""
        layers += [
            band(
                *(steps, computing, ends, "f-wait"),
                row=row,
                title=f"{name}: waiting",
                worker=worker,
            ),
            band(
                *(steps, zero, computing, f"f{cls} band"),
                row=row,
                title=f"{name}: computing",
                worker=worker,
            ),
            line(steps, np.where(most > 1.1 * ends, most, np.nan), f"s{cls} thin", row),
        ]
        layers.append(rules(row))
        num = steps.num_steps
        figures.append(f"{_mean_ms(computing, num)} + {_mean_ms(waiting, num)}")
        series += [
            Series(
                name=f"{name} computing", at_s=steps.at_s, values=computing, unit="s", cls=f"f{cls}"
            ),
            Series(name=f"{name} waiting", at_s=steps.at_s, values=waiting, unit="s", cls="f-wait"),
        ]
    means = "on the left: mean milliseconds computing + waiting"
    note = (
        f"the {len(shown)} workers that computed longest one by one, the mean of the others"
        if rest
        else ""
    )
    return Plot(
        layers=layers,
        height=height * len(parts),
        top=top,
        rows=[(name, text) for (name, _, _), text in zip(parts, figures, strict=True)],
        keys=[
            Key(cls=f"f{parts[0][1]}", text="computing", shape="box"),
            Key(cls="f-wait", text="waiting for slower workers", shape="box"),
            Key(cls="s-soft thin", text=f"scale up to {seconds(top)}"),
        ],
        note="; ".join(text for text in (means, note, beyond(largest, seconds(largest))) if text),
        decisions=history.decisions.between(view.begin_s, view.end_s),
        series=series,
    )


def _means(values: FloatArray) -> FloatArray:
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, values, 0.0).sum(1) / known.sum(1))


def _mean_ms(column: FloatArray, num_steps: FloatArray) -> str:
    known = np.isfinite(column)
    if not known.any():
        return "0"
    return f"{1000 * float(np.average(column[known], weights=num_steps[known])):.3g}"


def rules(row: Row) -> Layer:
    """The lower and upper end of a row's scale."""

    def draw(axes: Axes) -> Markup:
        width = number(axes.width)
        d = f"M0 {number(row.y - row.height)}h{width}M0 {number(row.y)}h{width}"
        return element("path", cls="line thin s-grid", d=d)

    return draw
