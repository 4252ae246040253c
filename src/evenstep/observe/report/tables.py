"""The numbers of a report as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import inf, isfinite
from typing import Any

import numpy as np
from msgspec import to_builtins

from evenstep import __version__
from evenstep.observe.history import History
from evenstep.observe.history.decisions import Decision
from evenstep.observe.history.roster import Presence
from evenstep.observe.pictures import PICTURES, whole
from evenstep.types import WorkerId

POINTS = 2000
"""Of the run for means of workers, and of each series."""


def as_data(histories: Sequence[History]) -> dict[str, Any]:
    """Everything, for `--json`."""
    return {"evenstep": __version__, "runs": [run_data(history) for history in histories]}


def run_data(history: History) -> dict[str, Any]:
    """One run: its figures, workers, decisions, and the series of its pictures."""
    begin_s, end_s = history.span
    return {
        "name": history.name,
        "begin_s": begin_s,
        "end_s": end_s,
        "problems": history.problems,
        "settings": to_builtins(history.settings),
        "about": history.about,
        "totals": {
            **asdict(history.totals),
            "untold": to_builtins(history.totals.untold),
            "samples_per_s": history.totals.samples_per_s,
        },
        "workers": workers(history),
        "decisions": [decision(d) for d in history.decisions.kept],
        "series": series(history),
    }


def workers(history: History) -> list[dict[str, Any]]:
    """A row for each worker and time that it was there; means are over steps of that time."""
    steps = history.between(*history.span, POINTS)
    columns = {"share": steps.share, "compute_s": steps.compute_s, "wait_s": steps.wait_s}
    column_of = {worker: i for i, worker in enumerate(steps.workers)}
    rows = []
    for there, until_s in _until_next(history.roster.presences):
        mean: dict[str, float] = {}
        i = column_of.get(there.worker)
        if i is not None:
            is_its = (steps.at_s > there.begin_s) & (steps.at_s <= until_s)
            known = np.isfinite(steps.share[:, i]) & is_its
            weights = steps.num_steps[known]
            if len(weights):
                mean = {
                    name: float(np.average(column[known, i], weights=weights))
                    for name, column in columns.items()
                }
                mean["num_steps"] = round(float(weights.sum()))
        rows.append(
            {
                "worker": there.worker,
                "kind": there.kind,
                "joined_s": there.begin_s,
                "ended_s": there.end_s,
                "end": there.end,
                "cause": there.cause,
                "num_steps": mean.get("num_steps", 0),
                "mean_share": mean.get("share"),
                "mean_compute_s": mean.get("compute_s"),
                "mean_wait_s": mean.get("wait_s"),
            }
        )
    return rows


def _until_next(presences: Sequence[Presence]) -> list[tuple[Presence, float]]:
    """Pair each presence with the time of its worker's next join, inf if it does not rejoin.

    A worker's last step may be recorded after the presence has ended.
    """
    until_s: dict[WorkerId, float] = {}
    found = []
    for presence in reversed(presences):
        found.append((presence, until_s.get(presence.worker, inf)))
        until_s[presence.worker] = presence.begin_s
    return found[::-1]


def decision(of: Decision) -> dict[str, Any]:
    """One decision, with the shares that it changed."""
    return {
        "index": of.index,
        "at_s": of.at_s,
        "step": of.step,
        "generation": of.generation,
        "kind": of.kind,
        "event": of.event,
        "reason": of.reason,
        "before": dict(zip(of.workers, of.before, strict=False)),
        "after": dict(zip(of.workers, of.after, strict=False)),
    }


def series(history: History) -> list[dict[str, Any]]:
    """The numbers in the pictures."""
    found = []
    view = whole(history, width=POINTS)
    for picture in PICTURES:
        plot = picture.plot(history, view)
        for of in plot.series if plot is not None else ():
            values = [v if isfinite(v) else None for v in of.values.tolist()]
            found.append(
                {
                    "picture": picture.name,
                    "name": of.name,
                    "unit": of.unit,
                    "at_s": of.at_s.tolist(),
                    "values": values,
                }
            )
    return found
