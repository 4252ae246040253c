"""Statuses of a run as the coordinator makes them, for tests of what people see."""

from __future__ import annotations

from typing import Any

from evenstep.observe.overview import overview
from evenstep.observe.tally import Tally

NO_TOTALS = overview(Tally(), None, {}, 0.0)


def worker(name: str, rank: int | None, **more: Any) -> dict[str, Any]:
    row = {"worker": name, "rank": rank, "share": 30, "compute_s": 0.25, "wait_s": 0.125}
    return {**row, "state": "training", "host": "here", "pid": 7, **more}


def status(step: int = 41, **more: Any) -> dict[str, Any]:
    """A status of two workers that train; `more` replaces what it says."""
    now = {
        **NO_TOTALS,
        "run": "runs/a",
        "state": "training",
        "reason": "",
        "generation": 2,
        "step": step,
        "samples_per_s": 5210.5,
        "restarts_left": 3,
        "settings": {},
        "workers": [worker("w0", 0), worker("w1", 1, share=34, wait_s=0.0)],
        "left_out": {},
        "at_s": 100.0,
        "part_of_limit": 0.97,
        "speedup": 1.5,
        "noise_scale": 900.0,
        "refused": {"without the token": 2, "too many": 1},
        "problems": [],
    }
    return {**now, **more}
