"""The number of workers over time, with the decisions that changed it or kept it."""

from __future__ import annotations

import numpy as np

from evenstep.observe.history import History
from evenstep.observe.history.decisions import Decision
from evenstep.observe.pictures.layers import shade, steps
from evenstep.observe.pictures.plot import (
    Axes,
    Key,
    Layer,
    Plot,
    Series,
    View,
    decision_mark,
    symbol,
    told,
)
from evenstep.observe.pictures.svg import Markup, element
from evenstep.observe.pictures.throughput import idle

KINDS = {
    "launch": ("up", "f-good", "launch"),
    "drain": ("down", "f-bad", "drain"),
    "stay": ("dot", "f-soft", "stay"),
    "pause": ("diamond", "f-ink", "pause"),
}


def cluster_size(history: History, view: View) -> Plot | None:
    """None before anyone has joined."""
    sizes = history.roster.sizes
    if not sizes:
        return None
    decided = [d for d in history.decisions.kept if d.kind in KINDS]
    at_s = np.array([at for at, _ in sizes])
    num = np.array([float(n) for _, n in sizes])
    shown = [d for d in decided if view.begin_s <= d.at_s <= view.end_s]
    end_s = min(history.ended_s, view.end_s)
    layers: list[Layer] = [
        shade(idle(history, view), "f-idle"),
        steps(at_s.tolist(), num.tolist(), end_s, "s-main"),
        *(_decision(d, _size_at(sizes, d.at_s), view) for d in _spread(shown, view)),
    ]
    there = {d.kind for d in shown}
    return Plot(
        layers=layers,
        top=float(num.max()) * 1.12 or 1.0,
        unit="workers",
        keys=[
            Key(cls="s-main", text="workers"),
            *(Key(cls=c, text=text, shape=s) for k, (s, c, text) in KINDS.items() if k in there),
        ],
        series=[Series(name="workers", at_s=at_s, values=num, unit="workers", cls="s-main")],
    )


def _size_at(sizes: list[tuple[float, int]], at_s: float) -> int:
    return next((n for at, n in reversed(sizes) if at <= at_s), 0)


def _spread(decisions: list[Decision], view: View) -> list[Decision]:
    """Drop `stay` decisions that would overlap the mark before; keep all other kinds."""
    gap_s = 5.0 / view.width * (view.end_s - view.begin_s)
    kept: list[Decision] = []
    for decision in decisions:
        near = bool(kept) and decision.at_s - kept[-1].at_s < gap_s
        if not near or decision.kind != "stay":
            kept.append(decision)
    return kept


def _decision(decision: Decision, size: int, view: View) -> Layer:
    shape, cls, _ = KINDS[decision.kind]

    def draw(axes: Axes) -> Markup:
        title = told(decision, view)
        mark = symbol(shape, axes.x(decision.at_s), axes.y(size), f"{cls} mark")
        return decision_mark(view, decision, element("title", title), mark)

    return draw
