"""The roster as a Gantt chart: who was there, who joined, left and was lost, and stragglers."""

from __future__ import annotations

from evenstep.observe.history import History
from evenstep.observe.history.roster import Presence
from evenstep.observe.pictures.choose import colour
from evenstep.observe.pictures.layers import shade
from evenstep.observe.pictures.plot import Axes, Key, Layer, Plot, View, symbol
from evenstep.observe.pictures.svg import Markup, element
from evenstep.observe.pictures.throughput import idle
from evenstep.types import WorkerId

MAX_ROWS = 40
ROW, THIN_ROW = 20.0, 13.0
ENDS = {"lost": ("cross", "s-bad"), "left": ("bar", "s-ink")}
MARKS = {"straggler": ("up", "f-bad"), "drain": ("down", "f-soft")}


def roster(history: History, view: View) -> Plot | None:
    """None before anyone has joined."""
    there = [p for p in history.roster.presences if _is_in(p, view)]
    if not there:
        return None
    rows = _rows(history, there)
    shown = [p for p in there if p.worker in rows]
    height = ROW if len(rows) <= 20 else THIN_ROW
    begin_s = history.span[0]
    layers: list[Layer] = [shade(idle(history, view), "f-idle")]
    for presence in shown:
        y = (rows[presence.worker] + 0.5) * height
        joined = presence.begin_s > begin_s
        layers.append(_bar(history, presence, y, height, joined=joined, zero_s=view.zero_s))
    for mark in history.roster.marks:
        if mark.worker in rows and view.begin_s <= mark.at_s <= view.end_s:
            shape, cls = MARKS[mark.what]
            y = (rows[mark.worker] + 0.5) * height
            layers.append(_symbol(shape, mark.at_s, y, cls, f"{mark.what}: {mark.reason}"))
    hidden = {p.worker for p in there} - rows.keys()
    kind = (
        "more workers" if hidden & _busy(history, there) else "workers that were there throughout"
    )
    return Plot(
        layers=layers,
        height=height * len(rows),
        rows=[(worker, "") for worker in rows],
        keys=_keys(history, shown, view),
        note=f"and {len(hidden)} {kind}" if hidden else "",
        decisions=[
            d for d in history.decisions.between(view.begin_s, view.end_s) if d.kind != "plan"
        ],
    )


def _is_in(presence: Presence, view: View) -> bool:
    ended_s = presence.end_s
    return presence.begin_s <= view.end_s and (ended_s is None or ended_s >= view.begin_s)


def _rows(history: History, there: list[Presence]) -> dict[WorkerId, int]:
    """Assign rows to workers; of too many, keep those with joins, ends or marks first."""
    workers = dict.fromkeys(p.worker for p in there)
    if len(workers) > MAX_ROWS:
        busy = _busy(history, there)
        first = [w for w in workers if w in busy] + [w for w in workers if w not in busy]
        chosen = set(first[:MAX_ROWS])
        workers = dict.fromkeys(w for w in workers if w in chosen)
    return {worker: row for row, worker in enumerate(workers)}


def _busy(history: History, there: list[Presence]) -> set[WorkerId]:
    """Workers with a later join, an end or a mark."""
    begin_s = history.span[0]
    busy = {p.worker for p in there if p.begin_s > begin_s or p.end_s is not None}
    return busy | {mark.worker for mark in history.roster.marks}


def _bar(
    history: History, presence: Presence, y: float, height: float, *, joined: bool, zero_s: float
) -> Layer:
    cls = f"f{colour(history, presence.worker)} band"
    end_s = history.ended_s if presence.end_s is None else presence.end_s
    title = f"{presence.worker} ({presence.kind}): from {presence.begin_s - zero_s:.4g} s"
    if presence.end:
        title += f", {presence.end} at {end_s - zero_s:.4g} s"
        title += f": {presence.cause}" if presence.cause else ""

    def draw(axes: Axes) -> Markup:
        x = axes.x(max(presence.begin_s, axes.begin_s))
        width = axes.x(min(end_s, axes.end_s)) - x
        bar = element(
            "rect",
            x=x,
            y=y - 0.3 * height,
            width=max(width, 1.5),
            height=0.6 * height,
            rx=2,
            cls=cls,
        )
        parts = [element("title", title), bar]
        if joined and presence.begin_s >= axes.begin_s:
            parts.append(symbol("start", x, y, "f-ink", 0.24 * height))
        if presence.end_s is not None and presence.end_s <= axes.end_s:
            shape, ink = ENDS[presence.end]
            parts.append(symbol(shape, axes.x(presence.end_s), y, ink, 0.26 * height))
        return element("g", *parts, data_worker=presence.worker)

    return draw


def _symbol(shape: str, at_s: float, y: float, cls: str, title: str) -> Layer:
    def draw(axes: Axes) -> Markup:
        mark = symbol(shape, axes.x(at_s), y, cls)
        return element("g", element("title", title), mark)

    return draw


def _keys(history: History, shown: list[Presence], view: View) -> list[Key]:
    """What there is to explain."""
    begin_s = history.span[0]
    ends = {p.end for p in shown}
    marks = {m.what for m in history.roster.marks}
    keys = []
    if any(p.begin_s > begin_s for p in shown):
        keys.append(Key(cls="f-ink", text="joined", shape="start"))
    if "left" in ends:
        keys.append(Key(cls="s-ink", text="left", shape="bar"))
    if "lost" in ends:
        keys.append(Key(cls="s-bad", text="lost", shape="cross"))
    if "straggler" in marks:
        keys.append(Key(cls="f-bad", text="straggler", shape="up"))
    if "drain" in marks:
        keys.append(Key(cls="f-soft", text="asked to leave", shape="down"))
    if idle(history, view):
        keys.append(Key(cls="f-idle", text="nobody trains", shape="box"))
    return keys
