"""A run as people want to see it, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from evenstep.coordinate.member import Member
from evenstep.types import WorkerId


def row(worker: WorkerId, member: Member | None, rank: int | None, state: str) -> dict[str, Any]:
    """One worker."""
    here = member or Member(id=worker)
    return {
        "worker": worker,
        "rank": rank,
        "share": here.share if rank is not None else 0,
        "compute_s": here.compute_s,
        "wait_s": here.wait_s,
        "state": state,
        "host": here.host,
        "pid": here.pid,
    }


def samples_per_s(recent: Iterable[tuple[int, float]]) -> float:
    """Over steps of so many samples and seconds."""
    steps = list(recent)
    seconds = sum(s for _, s in steps)
    return round(sum(n for n, _ in steps) / seconds, 1) if seconds > 0 else 0.0
