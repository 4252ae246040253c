"""Tests which workers can connect to each other, in two rounds, while training goes on.

In the first round workers listen and report where. In the second, of any two workers the one that
would connect in Gloo tries to, and reports failures. Joiners are tested before the others wait for
them; all workers are tested when all wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from ipaddress import ip_address

from msgspec.structs import replace

from evenstep.coordinate.draft import Draft
from evenstep.coordinate.state import LinkProbe, RunMember
from evenstep.messages import Listen, Listening, Reach, Reached
from evenstep.types import WorkerId

DIAL_PART = 0.4  # of the silence that is borne: for a connection
NOWHERE = ("", 0)

Link = frozenset[WorkerId]


def reachable(d: Draft, ready: list[RunMember]) -> list[RunMember]:
    """The workers that may join now. While others train, new ones are tested first."""
    if d.running is None:
        return ready
    untested = [m.id for m in ready if not m.reachable]
    if untested and d.probe is None:
        start(d, {*d.running.roster, *untested}, joiners=untested)
    return [m for m in ready if m.reachable]


def start(d: Draft, workers: Iterable[WorkerId], joiners: Iterable[WorkerId] = ()) -> None:
    """Begin a test; it replaces one that is under way."""
    d.num_probes += 1
    d.probe = LinkProbe(
        id=f"{d.terms.term}.{d.num_probes}",  # a report to an earlier coordinator may come late
        workers=frozenset(workers) & d.members.keys(),
        joiners=frozenset(joiners),
        until_s=d.now_s + d.terms.silent_s,
    )
    d.send(Listen(probe=d.probe.id, seconds=2 * d.terms.silent_s), *sorted(d.probe.workers))


def listening(d: Draft, worker: WorkerId, message: Listening) -> None:
    """A worker listens, or says that it cannot."""
    probe = d.probe
    if probe is None or probe.id != message.probe or worker not in probe.workers:
        return
    door = (message.host, message.port) if _is_address(message.host) else NOWHERE
    d.probe = replace(probe, doors={**probe.doors, worker: door})


def reached(d: Draft, worker: WorkerId, message: Reached) -> None:
    """A worker has tried to connect to others."""
    probe = d.probe
    if probe is None or probe.id != message.probe or worker not in (probe.dials or {}):
        return
    assert probe.dials is not None
    unreached = probe.dials[worker].intersection(message.unreached)
    d.probe = replace(probe, unreached={**probe.unreached, worker: unreached})


def finished(d: Draft) -> LinkProbe | None:
    """The test under way, if it is over; begins its second round when the first one is."""
    if (
        d.probe is not None
        and d.probe.dials is None
        and _is_over(d, d.probe.workers, d.probe.doors)
    ):
        _dial(d, d.probe)
    probe = d.probe
    if probe is None or probe.dials is None or not _is_over(d, probe.dials, probe.unreached):
        return None
    d.probe = None
    return probe


def failed_links(probe: LinkProbe) -> set[Link]:
    """The pairs of workers that cannot connect."""
    return {frozenset((w, other)) for w, others in probe.unreached.items() for other in others}


def unanswered(probe: LinkProbe) -> frozenset[WorkerId]:
    """Joiners that did not take part."""
    silent = (probe.dials or {}).keys() - probe.unreached.keys()
    return probe.joiners & (silent | (probe.workers - probe.doors.keys()))


def cover(
    links: set[Link], ranks: Sequence[WorkerId], joiners: Collection[WorkerId]
) -> list[WorkerId]:
    """A small set of workers whose removal leaves no broken link.

    Joiners first, then the worker with the most such links, then the later in rank.
    """
    found: list[WorkerId] = []
    while links:
        degrees = Counter(worker for link in links for worker in link)
        found.append(max(degrees, key=lambda w: (w in joiners, degrees[w], ranks.index(w))))
        links = {link for link in links if found[-1] not in link}
    return found


def _dial(d: Draft, probe: LinkProbe) -> None:
    """Round 2: as in Gloo, the higher of two addresses connects to the lower."""
    open_at = {w: door for w, door in probe.doors.items() if door != NOWHERE and w in d.members}
    by_address = sorted(open_at, key=lambda w: (_order(open_at[w]), w))
    dials = {}
    for i, worker in enumerate(by_address):
        lower = by_address[:i]
        if probe.joiners and worker not in probe.joiners:
            lower = [w for w in lower if w in probe.joiners]
        if lower:
            dials[worker] = frozenset(lower)
            doors = {w: open_at[w] for w in lower}
            within_s = DIAL_PART * d.terms.silent_s
            d.send(Reach(probe=probe.id, doors=doors, within_s=within_s), worker)
    d.probe = replace(probe, dials=dials, until_s=d.now_s + d.terms.silent_s)


def _is_over(d: Draft, asked: Collection[WorkerId], answered: Collection[WorkerId]) -> bool:
    assert d.probe is not None
    return d.now_s >= d.probe.until_s or all(w in answered or w not in d.members for w in asked)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _order(door: tuple[str, int]) -> tuple[bytes, int]:
    return ip_address(door[0]).packed, door[1]
