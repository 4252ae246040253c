"""Who holds the others up: found when workers complain, never from silence alone."""

from __future__ import annotations

from collections.abc import Sequence

from evenstep.coordinate.member import Member
from evenstep.types import WorkerId

PATIENCE_STEPS = 10
NEWCOMER_S = 600.0  # for a worker's first step, in which a model may be compiled
APART_S = 1800.0  # for what a script does between two steps, as one who evaluates for all


def overdue(
    roster: Sequence[Member],
    now_s: float,
    *,
    silent_s: float,
    patience_s: float,
    lease_s: float,
) -> dict[WorkerId, str]:
    """Whom to leave out of the next generation, and why.

    Nobody, while no worker that is heard of says it is stuck. Then those that are silent; else the
    only one that does not wait itself, once all others have waited for `patience_s`. If nobody at
    all is heard of, it may be us who are cut off: all are given up when their lease is over.
    """
    if roster and all(now_s - m.heard_s > lease_s for m in roster):
        return {m.id: "silent, as all are, for longer than the lease" for m in roster}
    silent = {m.id: now_s - m.heard_s for m in roster if now_s - m.heard_s > silent_s}
    complaints = [
        m.stuck_s if m.stuck_s is not None else m.alive_s
        for m in roster
        if m.id not in silent and _complains(m, now_s, patience_s)
    ]
    if not complaints:
        return {}
    if silent:
        return {w: f"silent for {s:.0f} s while others wait for it" for w, s in silent.items()}
    since_s = min(complaints)
    busy = [m for m in roster if m.stuck_s is None and not (m.waiting and m.alive_s >= since_s)]
    if len(busy) != 1:
        return {}
    waits = [_waits_s(m, now_s) for m in roster if m is not busy[0]]
    late, waited_s = busy[0], min(waits)
    allowed_s = APART_S if late.apart else 0.0 if late.has_stepped else NEWCOMER_S
    if waited_s < max(patience_s, allowed_s):
        return {}
    return {late.id: f"does not finish its step; all others have waited for {waited_s:.0f} s"}


def deadlocked(roster: Sequence[Member], now_s: float, patience_s: float) -> bool:
    """Whether all are there and all wait: for each other, since a connection between two broke."""
    return len(roster) > 1 and all(_complains(m, now_s, patience_s) for m in roster)


def _complains(member: Member, now_s: float, patience_s: float) -> bool:
    # A worker says so once a generation. If it waits again, only its heartbeats tell.
    return member.stuck_s is not None or _waits_s(member, now_s) > patience_s


def _waits_s(member: Member, now_s: float) -> float:
    return now_s - member.waiting_since_s if member.waiting_since_s is not None else 0.0
