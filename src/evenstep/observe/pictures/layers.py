"""Layers of a plot area: lines, bands and stacks, interrupted where no steps were made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from evenstep.observe.pictures.plot import Axes, Layer
from evenstep.observe.pictures.svg import Markup, element, join, number
from evenstep.types import FloatArray

GAP = 0.012
"""Part of the picture's width from which on a time without steps breaks a line."""


class Points(Protocol):
    """Between which times, and in which generation, points are."""

    @property
    def from_s(self) -> FloatArray: ...
    @property
    def at_s(self) -> FloatArray: ...
    @property
    def generation(self) -> FloatArray: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A part of the plot area, with a scale of its own: from `y` up by `height` for `top`."""

    y: float
    height: float
    top: float

    def at(self, value: float) -> float:
        """Pixels from the upper edge of the plot area."""
        return self.y - min(value / self.top, 1.02) * self.height


def pieces(points: Points, axes: Axes) -> Iterator[slice]:
    """The points of one roster without a gap between them."""
    gap_s = GAP * (axes.end_s - axes.begin_s)
    gaps = points.from_s[1:] - points.at_s[:-1] > gap_s
    breaks = np.flatnonzero(gaps | (np.diff(points.generation) != 0)) + 1
    edges = [0, *breaks.tolist(), len(points.at_s)]
    for first, end in pairwise(edges):
        if end > first:
            yield slice(first, end)


def line(points: Points, values: NDArray[np.floating], cls: str, row: Row | None = None) -> Layer:
    """A line through the points, each in the middle of its steps."""

    def draw(axes: Axes) -> Markup:
        y = row.at if row else axes.y
        paths = []
        for piece in pieces(points, axes):
            known = np.isfinite(values[piece])
            for part in _runs(known):
                begin, end, column = (c[piece][part] for c in (points.from_s, points.at_s, values))
                middle = (begin + end) / 2
                times = (
                    [begin[0], *middle[1:-1], end[-1]] if len(middle) > 1 else [begin[0], end[0]]
                )
                heights = column if len(middle) > 1 else [column[0]] * 2
                at = [(axes.x(t), y(v)) for t, v in zip(times, heights, strict=True)]
                if at[-1][0] - at[0][0] < 2:  # a single step would not be seen
                    at = [(at[0][0] - 1, at[0][1]), (at[0][0] + 1, at[0][1])]
                paths.append("M" + "L".join(f"{number(a)} {number(b)}" for a, b in at))
        return element("path", cls=f"line {cls}", d="".join(paths)) if paths else Markup("")

    return draw


def steps(times_s: Sequence[float], values: Sequence[float], end_s: float, cls: str) -> Layer:
    """A value that holds from each time to the next."""

    def draw(axes: Axes) -> Markup:
        if not len(times_s):
            return Markup("")
        path = f"M{number(axes.x(times_s[0]))} {number(axes.y(values[0]))}"
        for at_s, value in zip(times_s[1:], values[1:], strict=True):
            path += f"H{number(axes.x(at_s))}V{number(axes.y(value))}"
        return element("path", cls=f"line {cls}", d=f"{path}H{number(axes.x(end_s))}")

    return draw


def band(
    points: Points,
    low: NDArray[np.floating],
    high: NDArray[np.floating],
    cls: str,
    *,
    row: Row | None = None,
    title: str = "",
    worker: str = "",
) -> Layer:
    """The area between two values, each held over the steps of its point."""

    def draw(axes: Axes) -> Markup:
        y = row.at if row else axes.y
        paths = []
        for piece in pieces(points, axes):
            known = np.isfinite(low[piece]) & np.isfinite(high[piece])
            for part in _runs(known):
                begin, end, a, b = (c[piece][part] for c in (points.from_s, points.at_s, low, high))
                if not (b > a).any():
                    continue
                edges = [axes.x(begin[0]), *(axes.x(t) for t in end)]
                if edges[-1] - edges[0] < 1:
                    edges[-1] = edges[0] + 1
                upper = _stairs(edges, [y(v) for v in b])
                lower = _stairs(edges[::-1], [y(v) for v in a[::-1]])
                paths.append(f"M{upper}L{lower}z")
        if not paths:
            return Markup("")
        path = element("path", d="".join(paths))
        about = [element("title", title)] if title else []
        return element("g", *about, path, cls=cls, data_worker=worker or None)

    return draw


def shade(spans: Sequence[tuple[float, float, str]], cls: str) -> Layer:
    """Times, over the whole height, with what they are."""

    def draw(axes: Axes) -> Markup:
        parts = []
        for begin_s, end_s, title in spans:
            x = axes.x(max(begin_s, axes.begin_s))
            width = axes.x(min(end_s, axes.end_s)) - x
            if width > 0:
                box = {"x": x, "y": 0.0, "width": max(width, 1.0), "height": axes.height}
                parts.append(element("rect", element("title", title), cls=cls, **box))
        return join(parts)

    return draw


def _stairs(edges: Sequence[float], heights: Sequence[float]) -> str:
    """Horizontal pieces between edges; equal heights become one piece."""
    text = f"{number(edges[0])} {number(heights[0])}"
    before = number(heights[0])
    for i in range(1, len(heights)):
        now = number(heights[i])
        if now != before:
            text += f"H{number(edges[i])}V{now}"
            before = now
    return f"{text}H{number(edges[-1])}"


def _runs(known: NDArray[np.bool_]) -> Iterator[slice]:
    """Where values are known, without a gap."""
    edges = np.flatnonzero(np.diff(known, prepend=False, append=False))
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        yield slice(int(first), int(end))
