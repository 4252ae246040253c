"""Throughput over time, with the limit and equal shares."""

from __future__ import annotations

import numpy as np

from evenstep.observe.history import History
from evenstep.observe.pictures.choose import beyond, robust_top, window
from evenstep.observe.pictures.layers import band, line, shade
from evenstep.observe.pictures.layers import steps as held
from evenstep.observe.pictures.plot import Key, Layer, Plot, Series, View
from evenstep.observe.pictures.ticks import short


def throughput(history: History, view: View) -> Plot | None:
    """None without steps."""
    steps = window(history, view)
    if not len(steps):
        return None
    rate = steps.samples_per_s
    low = np.minimum(steps.batch / steps.longest_s, rate)
    high = np.maximum(steps.batch / steps.shortest_s, rate)
    known = history.estimates(view.begin_s, view.end_s, view.points)
    at_s, equal, limit = known.T
    end_s = float(steps.at_s[-1])
    top, largest = robust_top(np.concatenate([rate, limit, np.percentile(high, [90])]))
    layers: list[Layer] = [
        shade(idle(history, view), "f-idle"),
        band(steps, low, high, "f-main soft-fill"),
        held(at_s, equal, end_s, "s-soft dots"),
        held(at_s, limit, end_s, "s-good dash"),
        line(steps, rate, "s-main"),
    ]
    keys = [Key(cls="s-main", text="throughput")]
    series = [
        Series(name="throughput", at_s=steps.at_s, values=rate, unit="samples/s", cls="s-main")
    ]
    if len(at_s):
        keys += [Key(cls="s-good dash", text="limit"), Key(cls="s-soft dots", text="equal shares")]
        series += [
            Series(name="limit", at_s=at_s, values=limit, unit="samples/s", cls="s-good"),
            Series(name="equal shares", at_s=at_s, values=equal, unit="samples/s", cls="s-soft"),
        ]
    keys.append(Key(cls="f-main soft-fill", text="slowest to fastest step", shape="box"))
    return Plot(
        layers=layers,
        top=top,
        unit="samples/s",
        keys=keys,
        note=beyond(largest, f"{short(largest)} samples/s"),
        decisions=history.decisions.between(view.begin_s, view.end_s),
        series=series,
    )


def idle(history: History, view: View) -> list[tuple[float, float, str]]:
    """Times without training because the roster changed or was too small."""
    steps = window(history, view)
    at = np.flatnonzero(steps.idle_s > 0)
    spans = [
        (float(steps.from_s[i] - steps.idle_s[i]), float(steps.from_s[i]), _idle(steps.idle_s[i]))
        for i in at
    ]
    for begin_s, end_s, reason in history.roster.pauses:
        spans.append((begin_s, history.ended_s if end_s is None else end_s, f"paused: {reason}"))
    return spans


def _idle(seconds: float) -> str:
    return f"{seconds:.2f} s without training: the roster changed"
