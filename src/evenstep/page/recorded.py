"""The status of a run without a coordinator, made from its journal.

It has the fields of a coordinator's status, so that the page shows both alike.
"""

from __future__ import annotations

from typing import Any

from evenstep.observe.ending import ended, unanswered
from evenstep.observe.history import History, RunWindow
from evenstep.observe.overview import overview
from evenstep.observe.tally import Tally

LAST_S = 1.0
"""How far back from the end of the run to look for the last step first."""


def recorded_status(
    history: History | None, *, has_journal: bool, has_coordinator: bool, is_growing: bool
) -> dict[str, Any]:
    """The newest state in a journal. `has_coordinator`: its run has, or had, one."""
    tally = history.tally if history is not None else Tally()
    settings = history.settings if history is not None else None
    facts = dict(history.about.get("facts", {})) if history is not None else {}
    totals = tally.totals
    rate = totals.samples_per_s
    seen = overview(tally, settings, facts, rate)
    is_done = 0 < seen["progress"]["total_samples"] <= seen["progress"]["samples"]
    left_because = history.roster.left_because if history is not None else ""
    if history is None and has_journal:
        state, reason = "reading", "the journal"
    elif history is None and not has_coordinator:
        state, reason = "starting", "nothing is recorded yet"
    elif left_because and has_coordinator:
        state, reason = ended(left_because)
    elif is_growing:
        state, reason = "training", "by its journal, which is being written"
    elif is_done:
        state, reason = "finished", ""
    elif has_coordinator:
        state, reason = "no coordinator", unanswered() if history else "no coordinator answers"
    else:
        state, reason = "recorded", ""
    if state != "training":
        seen["progress"]["seconds_left"] = 0.0
        seen |= {"part_of_limit": totals.part_of_limit, "speedup": totals.speedup}
    step, generation, rows = _last_step(history)
    return {
        "state": state,
        "reason": reason,
        "is_live": state == "training",
        "takes_commands": False,
        "generation": generation,
        "step": step,
        "samples_per_s": rate,
        "workers": rows,
        "left_out": {},
        "at_s": history.span[1] if history is not None else 0.0,
        "problems": [],
        **seen,
    }


def _last_step(history: History | None) -> tuple[int, int, list[dict[str, Any]]]:
    """Number and generation of the last step, and a row for each of its workers."""
    if history is None or not history.totals.num_steps:
        return -1, 0, []
    begin_s, end_s = history.span
    back_s, window = LAST_S, _before(history, LAST_S)
    while not len(window) and back_s < end_s - begin_s:
        back_s *= 4
        window = _before(history, back_s)
    if not len(window):
        return -1, 0, []
    there = {p.worker for p in history.roster.presences if p.end_s is None}
    share, compute_s, wait_s = window.share[-1], window.compute_s[-1], window.wait_s[-1]
    took_part = [i for i, samples in enumerate(share) if samples == samples]  # else NaN
    rows = [
        {
            "worker": window.workers[i],
            "rank": rank,
            "share": round(float(share[i])),
            "compute_s": float(compute_s[i]),
            "wait_s": float(wait_s[i]),
            "state": "training" if window.workers[i] in there else "gone",
            "host": "",
            "pid": 0,
        }
        for rank, i in enumerate(took_part)
    ]
    decided = history.decisions.kept
    return int(window.step[-1]), decided[-1].generation if decided else 0, rows


def _before(history: History, back_s: float) -> RunWindow:
    end_s = history.span[1]
    return history.between(end_s - back_s, end_s, 1000)
