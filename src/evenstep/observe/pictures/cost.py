"""Cost so far: by the workers' prices, or in worker-hours."""

from __future__ import annotations

import numpy as np

from evenstep.observe.history import History
from evenstep.observe.pictures.plot import Axes, Key, Layer, Plot, Series, View
from evenstep.observe.pictures.svg import Markup, element, number
from evenstep.observe.pictures.ticks import short
from evenstep.types import FloatArray


def cost(history: History, view: View) -> Plot | None:
    """None before the first worker-hour, or if all workers are free."""
    changes = history.roster.costs
    total = history.roster.cost_at(history.ended_s)
    if not changes or total <= 0:
        return None
    at_s = np.array([at for at, _, _ in changes] + [history.ended_s])
    paid = np.array([so_far for _, so_far, _ in changes] + [total])
    inner = at_s[(at_s > view.begin_s) & (at_s < view.end_s)]
    times = np.concatenate([[view.begin_s], inner, [min(view.end_s, history.ended_s)]])
    values = np.interp(times, at_s, paid)
    name = "cost" if history.totals.is_priced else "worker-hours"
    top = float(values.max()) * 1.05
    return Plot(
        layers=[_filled(times, values)],
        height=130.0,
        top=top or 1.0,
        unit=name,
        keys=[
            Key(cls="s-main", text=f"{name}: {short(float(values[-1]))} so far"),
        ],
        series=[Series(name=name, at_s=times, values=values, cls="s-main")],
    )


def _filled(times: FloatArray, values: FloatArray) -> Layer:
    def draw(axes: Axes) -> Markup:
        points = "L".join(
            f"{number(axes.x(t))} {number(axes.y(v))}" for t, v in zip(times, values, strict=True)
        )
        floor = number(axes.y(0.0))
        area = f"M{points}V{floor}H{number(axes.x(times[0]))}z"
        return Markup(
            element("path", cls="f-main soft-fill", d=area)
            + element("path", cls="line s-main", d=f"M{points}")
        )

    return draw
