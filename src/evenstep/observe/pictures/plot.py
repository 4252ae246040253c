"""Plots: axes, layers, legend and data series, and how they are drawn as SVG.

Every picture has the run's time as its horizontal axis, so that one zoom serves all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log10
from textwrap import wrap
from typing import Any

import numpy as np

from evenstep.observe.history.decisions import Decision
from evenstep.observe.pictures import theme
from evenstep.observe.pictures.labels import CHAR, LEFT, num_characters, shortened
from evenstep.observe.pictures.svg import Markup, element, join, number
from evenstep.observe.pictures.ticks import clock, short, time_ticks, value_ticks
from evenstep.types import FloatArray

RIGHT, BOTTOM, LINE = 14.0, 26.0, 18.0
STRIP = 12.0  # above the plot area, for marks of decisions
FONT = 12
SMALL_CHAR = 6.0  # width of a character of an axis, about
NARROW_TICKS = 9  # also where the picture is narrow, if their labels fit
MIN_MARK_GAP = 4.0  # pixels between two marks of plans


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The requested time span, and the size of the picture in pixels."""

    begin_s: float
    end_s: float
    width: int = 760
    top: float | None = None  # of the vertical axis, to compare pictures; None: as needed
    left: float = LEFT  # of the plot area: the same in all pictures, for one time axis
    zero_s: float = 0.0  # what is written as 0: the beginning of the run, by its clock
    links: str = ""  # marks of decisions are links to this, with their number

    @property
    def points(self) -> int:
        """As many as can be told apart."""
        return max(40, self.width // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An entry of the legend."""

    cls: str
    text: str
    shape: str = "line"  # line, box, or the name of a symbol


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """Numbers in a picture, for tables and for a crosshair."""

    name: str
    at_s: FloatArray
    values: FloatArray
    unit: str = ""
    cls: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The plot area in pixels, and the scales of time and values."""

    begin_s: float
    end_s: float
    width: float
    height: float
    top: float
    bottom: float = 0.0
    is_log: bool = False
    zero_s: float = 0.0

    def x(self, at_s: float) -> float:
        """Pixels from the left edge of the plot area."""
        return (at_s - self.begin_s) / (self.end_s - self.begin_s) * self.width

    def y(self, value: float) -> float:
        """Pixels from its upper edge."""
        if self.is_log:
            low, high = log10(self.bottom), log10(self.top)
            value = max(value, self.bottom / 10)
            return self.height * (1 - (log10(value) - low) / (high - low))
        return self.height * (1 - (value - self.bottom) / (self.top - self.bottom))


Layer = Callable[[Axes], Markup]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Contents of a picture. Its plot area is `height` pixels high."""

    layers: Sequence[Layer]
    height: float = 180.0
    top: float = 1.0
    bottom: float = 0.0
    is_log: bool = False
    unit: str = ""
    rows: Sequence[tuple[str, str]] = ()  # instead of a scale: labels, with figures
    keys: Sequence[Key] = ()
    note: str = ""
    decisions: Sequence[Decision] = ()
    series: Sequence[Series] = field(default=())

    def readout(self) -> list[dict[str, Any]]:
        """The numbers in it, as plain data; null where there is none."""
        return [
            {
                "name": s.name,
                "unit": s.unit,
                "class": s.cls,
                "at_s": np.round(s.at_s, 6).tolist(),
                "values": [float(f"{v:.6g}") if np.isfinite(v) else None for v in s.values],
            }
            for s in self.series
        ]


def drawn(
    plot: Plot, view: View, name: str, title: str, label: str, *, standalone: bool = False
) -> Markup:
    """The picture. `standalone`: a file of its own, with its title and style sheet."""
    left = view.left
    width = max(view.width, 240) - left - RIGHT
    head, legend = _legend(plot.keys, left, max(view.width, 240), LINE + 4 if standalone else 0.0)
    top = legend + (STRIP if plot.decisions else 8.0)
    top_value = plot.top if view.top is None or plot.rows else max(view.top, plot.top)
    axes = Axes(
        begin_s=view.begin_s,
        end_s=max(view.end_s, view.begin_s + 1e-6),
        width=width,
        height=plot.height,
        top=top_value,
        bottom=plot.bottom,
        is_log=plot.is_log,
        zero_s=view.zero_s,
    )
    notes = wrap(plot.note, width=int((max(view.width, 240) - left) / 5.8)) if plot.note else []
    height = top + plot.height + BOTTOM + 15.0 * len(notes) + (4.0 if notes else 0.0)
    inside = element(
        "svg",
        join(layer(axes) for layer in plot.layers),
        x=left,
        y=top,
        width=width,
        height=plot.height,
    )
    parts: list[object] = []
    if standalone:
        parts.append(element("style", Markup(theme.standalone())))
        parts.append(element("rect", cls="f-paper", width="100%", height="100%"))
        parts.append(element("text", title, x=8, y=16, font_size=14, cls="strong"))
    marks = _marks(plot.decisions, axes, view, top)
    parts += [head, _grid(plot, axes, left, top), inside, marks, _time_axis(axes, left, top)]
    for i, text in enumerate(notes):
        y = top + plot.height + BOTTOM + 15.0 * i + 9.0
        parts.append(element("text", text, x=left, y=y, font_size=11, cls="soft"))
    return element(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg" if standalone else None,
        cls="es",
        viewBox=f"0 0 {max(view.width, 240)} {number(height)}",
        width=max(view.width, 240),
        height=float(height),
        role="img",
        aria_label=f"{title}: {label}",
        data_picture=name,
        data_begin=repr(float(axes.begin_s)),
        data_end=repr(float(axes.end_s)),
        data_left=left,
        data_right=left + width,
        data_top=top,
        data_bottom=top + plot.height,
    )


def _legend(keys: Sequence[Key], left: float, width: float, top: float) -> tuple[Markup, float]:
    """The legend, wrapped to the width, and where it ends."""
    parts, x, y = [], left, top + 12.0
    for key in keys:
        room = 24 + CHAR * len(key.text)
        if x + room > width and x > left:
            x, y = left, y + LINE
        parts.append(_swatch(key, x, y))
        parts.append(element("text", key.text, x=x + 20, y=y, font_size=FONT))
        x += room + 10
    return join(parts), y + 4 if keys else top


def _swatch(key: Key, x: float, y: float) -> Markup:
    if key.shape == "line":
        return element("path", cls=f"line {key.cls}", d=f"M{number(x)} {number(y - 4)}h15")
    if key.shape == "box":
        return element("rect", cls=key.cls, x=x + 1, y=y - 10, width=13, height=11, rx=1.5)
    return symbol(key.shape, x + 7, y - 4, key.cls)


def symbol(shape: str, x: float, y: float, cls: str, size: float = 4.5) -> Markup:
    """A small mark: cross, bar, up, down, dot, diamond or start."""
    at, n, r = f"M{number(x)} {number(y)}", number(size), number(2 * size)
    d = {
        "cross": f"{at}m-{n} -{n}l{r} {r}m0 -{r}l-{r} {r}",
        "bar": f"{at}m0 -{n}v{r}",
        "up": f"{at}m-{n} {n}h{r}l-{n} -{r}z",
        "down": f"{at}m-{n} -{n}h{r}l-{n} {r}z",
        "dot": f"{at}m-{n} 0a{n} {n} 0 1 0 {r} 0a{n} {n} 0 1 0 -{r} 0z",
        "diamond": f"{at}m0 -{n}l{n} {n}l-{n} {n}l-{n} -{n}z",
        "start": f"{at}m0 -{n}l{n} {n}l-{n} {n}z",
    }[shape]
    kind = "line" if shape in ("cross", "bar") else ""
    return element("path", cls=f"{kind} {cls}".strip(), d=d)


def _grid(plot: Plot, axes: Axes, left: float, top: float) -> Markup:
    parts = []
    if plot.rows:
        row = plot.height / len(plot.rows)
        names = shortened([label for label, _ in plot.rows], num_characters(left))
        for i, ((label, figures), shown) in enumerate(zip(plot.rows, names, strict=True)):
            y = top + (i + 0.5) * row + (-2 if figures else 4)
            at = {"x": left - 6, "text_anchor": "end"}
            text = element("text", shown, y=y, font_size=FONT, **at)
            parts.append(element("g", element("title", label), text))
            if figures:
                parts.append(element("text", figures, y=y + 13, font_size=10, cls="soft num", **at))
        return join(parts)
    for value in _values(axes):
        y = top + axes.y(value)
        line = f"M{number(left)} {number(y)}h{number(axes.width)}"
        parts.append(element("path", cls="line thin s-grid", d=line))
        parts.append(
            element(
                "text",
                short(value),
                x=left - 6,
                y=y + 4,
                font_size=11,
                text_anchor="end",
                cls="soft num",
            )
        )
    return join(parts)


def _values(axes: Axes) -> list[float]:
    if not axes.is_log:
        return value_ticks(axes.top)
    first, last = round(log10(axes.bottom)), round(log10(axes.top))
    every = max(1, (last - first + 3) // 4)
    return [10.0**power for power in range(first, last + 1, every)]


def _time_axis(axes: Axes, left: float, top: float) -> Markup:
    times, unit = _time_ticks(axes)  # from zero_s on
    y = top + axes.height
    parts = [
        element(
            "path", cls="line thin s-soft", d=f"M{number(left)} {number(y)}h{number(axes.width)}"
        )
    ]
    for at_s in times:
        x = left + axes.x(axes.zero_s + at_s)
        parts.append(element("path", cls="line thin s-soft", d=f"M{number(x)} {number(y)}v4"))
        text = clock(at_s, unit)
        if x + SMALL_CHAR * (len(text) / 2 + len(unit)) + 4 > left + axes.width:
            continue  # the unit is there
        parts.append(
            element(
                "text",
                text,
                x=x,
                y=y + 16,
                font_size=11,
                text_anchor="middle",
                cls="soft num",
            )
        )
    end = left + axes.width
    parts.append(
        element("text", unit, x=end, y=y + 16, font_size=11, text_anchor="end", cls="soft")
    )
    return join(parts)


def _time_ticks(axes: Axes) -> tuple[list[float], str]:
    """Times since zero_s, as many as have room for their labels and are of use."""
    begin_s, end_s = axes.begin_s - axes.zero_s, axes.end_s - axes.zero_s
    for most in range(max(NARROW_TICKS, int(axes.width // 80)), 2, -1):
        times, unit = time_ticks(begin_s, end_s, most)
        room = SMALL_CHAR * max((len(clock(at_s, unit)) for at_s in times), default=0) + 6.0
        if len(times) < 2 or axes.x(times[1]) - axes.x(times[0]) >= room:
            return times, unit
    return time_ticks(begin_s, end_s, 2)


def _marks(decisions: Sequence[Decision], axes: Axes, view: View, top: float) -> Markup:
    """A mark above the plot area for each decision; where plans are too close, for some of them."""
    parts, last = [], -MIN_MARK_GAP
    for decision in decisions:
        x = view.left + axes.x(decision.at_s)
        if decision.kind in ("plan", "stay") and x - last < MIN_MARK_GAP:
            continue
        last = x
        major = decision.kind not in ("plan", "stay")
        parts.append(
            decision_mark(
                view,
                decision,
                element("title", told(decision, view)),
                element("path", cls="hit", d=f"M{number(x - 3)} {number(top)}h6v-14h-6z"),
                element(
                    "path",
                    cls=f"line mark {'s-ink' if major else 's-soft'}",
                    d=f"M{number(x)} {number(top - 1)}v-{9 if major else 5}",
                ),
            )
        )
    return join(parts)


def told(decision: Decision, view: View) -> str:
    """A decision in a line."""
    return f"{decision.kind} at {decision.at_s - view.zero_s:.6g} s: {decision.reason}"


def decision_mark(view: View, decision: Decision, *inside: Markup) -> Markup:
    """A mark that a script finds by its number, and that may be a link."""
    label = f"{decision.kind}: {decision.reason}"
    about = {"cls": f"decision {decision.kind}", "data_decision": decision.index}
    if view.links:
        href = f"{view.links}{decision.index}"
        return element("a", *inside, href=href, aria_label=label, **about)
    return element("g", *inside, tabindex=0, role="button", aria_label=label, **about)
