"""The report as one HTML file: no script, nothing from outside, everything from a run escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from msgspec import to_builtins

from evenstep import __version__
from evenstep.observe.block import duration
from evenstep.observe.history import History
from evenstep.observe.history.decisions import Decision
from evenstep.observe.pictures import PICTURES, Picture, View, draw_alike, stylesheet, whole
from evenstep.observe.pictures.svg import Markup, element, join
from evenstep.observe.pictures.ticks import seconds
from evenstep.observe.report.style import STYLE
from evenstep.observe.report.tables import workers
from evenstep.observe.summary import figures

WIDE, HALF, NARROW = 860, 545, 350
"""Pixels of a picture: of one run, of several side by side, on a phone."""

MAX_DECISIONS = 400
"""Rows of a table of decisions: of more, plans are left out first."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(histories: Sequence[History]) -> str:
    """The report on one run, or on several side by side."""
    names = ", ".join(history.name for history in histories)
    head = element(
        "head",
        Markup('<meta charset="utf-8"/>'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1"/>'),
        Markup('<meta name="color-scheme" content="light dark"/>'),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("title", f"evenstep report: {names}"),
        element("style", Markup(STYLE + stylesheet())),
    )
    body = element(
        "body",
        element("header", element("h1", names), _about(histories)),
        *map(_problems, histories),
        _summary(histories),
        *(_figure(picture, histories) for picture in PICTURES),
        *(_worker_table(history, len(histories) > 1) for history in histories),
        *(_decision_table(i, history, len(histories) > 1) for i, history in enumerate(histories)),
        *(_settings(history, len(histories) > 1) for history in histories),
        element("footer", f"evenstep {__version__}"),
    )
    return "<!doctype html>\n" + element("html", head, body, lang="en") + "\n"


def _about(histories: Sequence[History]) -> Markup:
    lines = []
    for history in histories:
        told = history.about.get("scenario") or history.about.get("script") or ""
        clock = "simulated, on a virtual clock" if "clock" in history.about else ""
        parts = [str(part) for part in (told, clock) if part]
        if parts:
            name = f"{history.name}: " if len(histories) > 1 else ""
            lines.append(element("p", name + "; ".join(parts), cls="soft"))
    return join(lines)


def _problems(history: History) -> Markup:
    return join(element("p", f"{history.name}: {text}", cls="problem") for text in history.problems)


def _summary(histories: Sequence[History]) -> Markup:
    """Figures of one run as cards; of several, as a table."""
    found = [dict(figures(h.totals)) for h in histories]
    if len(found) == 1:
        if not found[0]:
            return element("p", "The run has no steps yet.")
        cards = [
            element("div", element("dt", name), element("dd", text))
            for name, text in found[0].items()
        ]
        return element("dl", *cards, cls="cards")
    names = list(dict.fromkeys(name for run in found for name in run))
    rows = [[name, *(run.get(name, "-") for run in found)] for name in names]
    table = _table(["", *(h.name for h in histories)], rows)
    return _section("Comparison", element("div", table, cls="compare"))


def _figure(picture: Picture, histories: Sequence[History]) -> Markup:
    """A picture of every run, wide and for phones; empty if no run has data for it."""
    wide = WIDE if len(histories) == 1 else HALF
    sizes = [(wide, "wide"), (NARROW, "narrow")]
    blocks = []
    for width, cls in sizes:
        spans = [history.span for history in histories]
        longest_s = max(end_s - begin_s for begin_s, end_s in spans)
        views = [_view(i, h, width, longest_s) for i, h in enumerate(histories)]
        drawn = draw_alike(picture, list(zip(histories, views, strict=True)))
        if not any(drawn):
            return Markup("")
        cells = [
            element(
                "div",
                element("h3", history.name) if len(histories) > 1 else "",
                Markup(svg) if svg else element("p", "no data", cls="soft"),
            )
            for history, svg in zip(histories, drawn, strict=True)
        ]
        blocks.append(element("div", *cells, cls=f"side {cls}"))
    caption = element("figcaption", picture.says)
    return element("figure", element("h2", picture.title), caption, *blocks)


def _view(i: int, history: History, width: int, longest_s: float) -> View:
    view = whole(history, width)
    return replace(view, end_s=view.begin_s + max(longest_s, 1e-3), links=f"#run{i}-")


def _worker_table(history: History, several: bool) -> Markup:
    head = ["worker", "kind", "there", "steps", "mean share", "computing", "waiting", "end"]
    rows = []
    begin_s = history.span[0]
    for w in workers(history):
        until = "" if w["ended_s"] is None else f"{duration(w['ended_s'] - begin_s)}"
        end = w["end"] + (f": {w['cause']}" if w["cause"] else "")
        known = w["mean_share"] is not None
        rows.append(
            [
                w["worker"],
                w["kind"],
                f"{duration(w['joined_s'] - begin_s)} to {until or 'end'}",
                f"{w['num_steps']:,}",
                f"{w['mean_share']:.1f}" if known else "-",
                seconds(w["mean_compute_s"]) if known else "-",
                seconds(w["mean_wait_s"]) if known else "-",
                end,
            ]
        )
    return _section(_titled("Workers", history, several), _table(head, rows))


def _decision_table(run: int, history: History, several: bool) -> Markup:
    """Why: every decision with its reason, and the shares it changed."""
    kept = shown = history.decisions.kept
    if len(kept) > MAX_DECISIONS:
        others = [d for d in kept if d.kind != "plan"][-MAX_DECISIONS:]
        plans = [d for d in kept if d.kind == "plan"]
        room = MAX_DECISIONS - len(others)
        shown = sorted([*others, *plans[len(plans) - room :]], key=lambda d: d.index)
    head = ["at", "step", "decision", "why"]
    rows = [
        element(
            "tr",
            element("td", _at(d.at_s - history.span[0])),
            element("td", f"{d.step:,}" if d.step >= 0 else ""),
            element("td", d.kind),
            element("td", d.reason, _shares(d), cls="text"),
            id=f"run{run}-{d.index}",
        )
        for d in shown
    ]
    title = _titled("Decisions", history, several)
    note = ""
    if len(shown) < history.decisions.num:
        num = f"{len(shown):,} of {history.decisions.num:,}"
        note = f"{num}: the newest plans, and what changed the roster"
    body = element("table", _head(head), element("tbody", *rows))
    return _section(title, element("p", note, cls="soft") if note else "", _scrolled(body))


def _at(seconds: float) -> str:
    """A time since the beginning of the run."""
    return f"{seconds:.2f} s" if seconds < 100 else duration(seconds)


def _shares(decision: Decision) -> Markup:
    """What a plan changed."""
    rows = zip(decision.workers, decision.before, decision.after, strict=False)
    moved = [f"{w} {a} → {b}" for w, a, b in rows if a != b]
    if not moved:
        return Markup("")
    more = f", and {len(moved) - 12} more" if len(moved) > 12 else ""
    return element("div", ", ".join(moved[:12]) + more, cls="soft")


def _settings(history: History, several: bool) -> Markup:
    told = {"settings": to_builtins(history.settings), "about": history.about}
    text = json.dumps(told, indent=2, ensure_ascii=False)
    title = _titled("Settings", history, several)
    return element("details", element("summary", title), element("pre", text))


def _titled(title: str, history: History, several: bool) -> str:
    return f"{title} of {history.name}" if several else title


def _section(title: str, *children: object) -> Markup:
    return element("section", element("h2", title), *children)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    return _scrolled(element("table", _head(head), element("tbody", *body)))


def _head(names: Sequence[str]) -> Markup:
    return element("thead", element("tr", *(element("th", name, scope="col") for name in names)))


def _scrolled(table: Markup) -> Markup:
    return element("div", table, cls="scrolled")
