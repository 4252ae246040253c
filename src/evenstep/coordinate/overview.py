"""A run as people want to see it, as plain data."""

from __future__ import annotations

from collections import deque
from typing import Any

from evenstep.coordinate.member import Member
from evenstep.types import Steps, WorkerId

RECENT_S = 10.0  # of the run's clock; the newest steps count if they took longer, too
OVERDUE = 10.0  # no report for this many times the last report's duration: stalled


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


class Throughput:
    """Samples per second of a generation's last steps, from what its leader tells of them."""

    def __init__(self) -> None:
        self._generation = 0
        self._told: deque[tuple[float, Steps]] = deque()  # when, and the steps since the one before

    def add(self, now_s: float, generation: int, steps: Steps) -> None:
        """Some steps were taken. Those of an earlier generation are forgotten."""
        if generation != self._generation:
            self._generation = generation
            self._told.clear()
        self._told.append((now_s, steps))
        while now_s - self._told[0][0] > RECENT_S:
            self._told.popleft()

    def samples_per_s(self, now_s: float, generation: int) -> float:
        """0 if this generation has reported no step, or none for much longer than a step takes."""
        if generation != self._generation or not self._told:
            return 0.0
        last_s, newest = self._told[-1]
        if now_s - last_s > max(RECENT_S, OVERDUE * newest.seconds):
            return 0.0
        recent = [steps for at_s, steps in self._told if now_s - at_s <= RECENT_S] or [newest]
        return round(sum(s.samples for s in recent) / sum(s.seconds for s in recent), 1)
