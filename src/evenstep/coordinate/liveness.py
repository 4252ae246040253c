"""Finds workers that hold up the others. Only complaints evict one, never silence alone."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from msgspec.structs import replace

from evenstep.coordinate import links
from evenstep.coordinate.announce import announce_end, force, hurry
from evenstep.coordinate.draft import Draft
from evenstep.coordinate.roster import advance, doubt, go_on, leave_out, lose, meet_again
from evenstep.coordinate.state import Changing, Contact, RunMember, Stopping, WorkerState
from evenstep.coordinate.takeover import abandon
from evenstep.messages import Alive, Generation, Goodbye, Stuck
from evenstep.types import WorkerId, listed

LINK_TESTS = 2  # that a joiner must fail in a row before it is left out
MAX_MEETINGS = 3  # attempts of a roster that cannot take a step, or of a joiner, before an eviction
STOP_S, STOP_STEPS = 3.0, 2  # for the step in flight when a run stops: the longer of the two
LEAVE_S = 10.0  # then for all to leave
SAVING_S = 600.0  # for the worker that writes the last checkpoint
RECENT_STEPS = 20  # whose median is the usual duration of a step
OWN_LAG_S = 2.0  # after such a gap, it was the coordinator that was not listening
PATIENCE_STEPS = 10
FIRST_STEP_S = 600.0  # deadline of a worker's first step, in which a model may be compiled
APART_S = 1800.0  # deadline of what a script does between two steps, such as an evaluation


# What workers report.


def read_clock(d: Draft) -> None:
    """Discount time in which the coordinator itself was not running: nobody was silent then."""
    lag_s = d.now_s - (d.now_s if d.timing.clock_read_s is None else d.timing.clock_read_s)
    if lag_s > OWN_LAG_S:
        d.contacts = {w: c.forgiven(d.now_s, lag_s) for w, c in d.contacts.items()}
        if isinstance(d.closing, Stopping):
            d.closing = replace(d.closing, since_s=d.closing.since_s + lag_s)
        if d.probe is not None:
            d.probe = replace(d.probe, until_s=d.probe.until_s + lag_s)
    d.timing = replace(d.timing, clock_read_s=d.now_s)


def heartbeat(contact: Contact, alive: Alive, now_s: float) -> Contact:
    """A worker's contact after a heartbeat."""
    if not alive.waiting:
        contact = contact.freed()
    elif contact.waiting_since_s is None:
        contact = replace(contact, waiting_since_s=now_s)
    return replace(
        contact,
        heard_s=now_s,
        heartbeat_s=now_s,
        waiting=alive.waiting,
        apart=alive.apart,
        saving=alive.saving,
        unsaved=alive.unsaved,
        generation=alive.generation,
    )


def stuck(d: Draft, worker: WorkerId, message: Stuck) -> None:
    """A worker waits for the others, longer than a step can take."""
    contact = replace(d.contacts[worker], generation=message.generation)
    d.contacts[worker] = contact
    watched = _watched(d)
    if watched is not None and watched.number == message.generation:  # else it is out of date
        if contact.stuck_s is None:
            contact = replace(contact, stuck_s=d.now_s)
        if contact.waiting_since_s is None:
            contact = replace(contact, waiting_since_s=d.now_s - message.waited_s)
        d.contacts[worker] = contact
    _unblock(d)


def stepped(d: Draft, seconds: float, workers: list[WorkerId]) -> None:
    """A step was taken: the workers in it do not wait any more."""
    recent = (*d.timing.recent_steps_s, seconds)[-RECENT_STEPS:]
    d.timing = replace(d.timing, recent_steps_s=recent, num_meetings=0)
    for worker in workers:
        if contact := d.contacts.get(worker):
            contact = contact.freed()
            d.contacts[worker] = (
                contact if contact.has_stepped else replace(contact, has_stepped=True)
            )


# What follows from it.


def watch(d: Draft) -> None:
    """Evict workers that the others wait for in vain."""
    usual_s, silent_s = median(d.timing.recent_steps_s or [0.0]), d.terms.silent_s
    patience_s = max(d.terms.patience_s, PATIENCE_STEPS * usual_s)
    limit_s = silent_s + patience_s
    if d.stopping:
        _urge(d, max(STOP_S, STOP_STEPS * usual_s))
    present = {w: c for w, c in d.contacts.items() if not d.is_in(w, WorkerState.DONE)}
    if d.finishing or d.parting:
        # The others may be gone and cannot complain.
        late = [w for w, c in present.items() if d.trains(w) and d.now_s - c.heard_s > limit_s]
        evict(d, dict.fromkeys(late, "silent while the others end"))
    elif (generation := _watched(d)) is not None:
        in_roster = set(generation.roster)
        roster = {w: c for w, c in present.items() if w in in_roster}
        lease_s = d.terms.lease_s
        blamed = overdue(roster, d.now_s, silent_s=silent_s, patience_s=patience_s, lease_s=lease_s)
        complete = len(roster) == len(generation.roster)
        if not blamed and complete:
            _unlock(d, generation, roster, patience_s)
        evict(d, blamed)


def check_leaver(d: Draft) -> None:
    """A leaver that disconnected early does not hold the change up for long."""
    gone_s = d.phase.leaver_gone_s if isinstance(d.phase, Changing) else None
    if gone_s is not None and d.now_s - gone_s > d.terms.silent_s:
        force(d)


def check_start_up(d: Draft) -> None:
    """Evict launched workers that are past their start-up deadline."""
    for worker in sorted(d.on_the_way()):
        started_s = d.process(worker).started_s
        queued = d.process(worker).queued
        if started_s is None or queued or d.is_in(worker, WorkerState.READY):
            continue
        if d.now_s - started_s > d.terms.start_s:
            text = f"{worker} is not ready {d.terms.start_s:g} s after its start"
            d.log(text, "warning")
            d.evict_process(worker)


def evict(d: Draft, blamed: Mapping[WorkerId, str]) -> None:
    """Leave these workers out of the next generation."""
    for worker, why in blamed.items():
        d.send(Goodbye(why=why), worker)
        d.hang_up(worker)
        doubt(d, worker)
        d.evict_process(worker)
    if blamed:
        lose(d, blamed)


def _unlock(
    d: Draft, generation: Generation, roster: Mapping[WorkerId, Contact], patience_s: float
) -> None:
    """If all wait for each other, test their connections first."""
    linked_s, silent_s = d.timing.linked_s, d.terms.silent_s
    is_linked = linked_s is not None and d.now_s - linked_s < silent_s
    is_tested = is_linked or (d.probe is not None and not d.probe.joiners)
    is_deadlocked = deadlocked(roster, d.now_s, patience_s)
    if is_deadlocked and is_linked:
        _resolve(d, generation)
    elif not is_tested and (is_deadlocked or suspicious(roster, d.now_s, silent_s)):
        links.start(d, generation.roster)


def judge_links(d: Draft) -> None:
    """If a test of connections is over, leave out the workers that others cannot connect to."""
    if (probe := links.finished(d)) is None:
        return
    silent = links.unanswered(probe)
    for worker in sorted(probe.joiners & d.members.keys()):
        member = d.members[worker]
        num_failed = member.num_failed_joins + (worker in silent)
        d.put(replace(member, reachable=worker not in silent, num_failed_joins=num_failed))
    new = {m.id for m in (*d.in_states(WorkerState.READY), *d.joiners())}
    # A worker on its way out of the roster does not matter to joiners, only to those who wait now.
    left = [m.id for m in d.in_states(WorkerState.LEFT) if d.is_running(m.id) and not probe.joiners]
    ranks = [*d.roster, *left, *sorted(new.difference(d.roster))]
    present = d.members.keys() & set(ranks)
    failed = {
        link
        for link in links.failed_links(probe)
        if link <= present and (not probe.joiners or link & new)
    }
    apart = {w: _unlinked(w, failed) for w in links.cover(failed, ranks, new)}
    for worker in sorted(probe.joiners & new):
        member = d.members[worker]
        if worker not in apart:
            d.put(replace(member, num_failed_tests=0))
            continue
        num_tests = member.num_failed_tests + 1
        d.put(replace(member, reachable=False, num_failed_tests=num_tests))
        if num_tests < LINK_TESTS:  # the other worker may have just died, which is not known yet
            del apart[worker]
    for worker in sorted(silent & new):
        if d.members[worker].num_failed_joins >= MAX_MEETINGS:
            apart[worker] = f"it did not answer {MAX_MEETINGS} times in a row"
    if not (apart or probe.joiners):
        d.timing = replace(d.timing, linked_s=d.now_s)
        watch(d)
    for worker in [w for w in apart if w in new]:
        d.evict_process(worker)  # through no fault of the script: it may be replaced
        leave_out(d, d.members[worker], apart[worker])
    evict(d, {w: why for w, why in apart.items() if w not in new})
    advance(d)


def _unlinked(worker: WorkerId, failed: set[links.Link]) -> str:
    others = sorted(other for link in failed if worker in link for other in link - {worker})
    return f"it and {listed(others)} cannot connect to each other: check addresses and firewalls"


def _urge(d: Draft, grace_s: float) -> None:
    """When stopping, bound the wait for the step in flight and for each worker to leave.

    The step in flight is rolled back, so nothing but that step is lost.
    """
    assert isinstance(d.closing, Stopping)
    waited_s = d.now_s - d.closing.since_s
    if waited_s > grace_s and not d.closing.announced:
        announce_end(d)  # the change under way is abandoned
    elif waited_s > grace_s:
        hurry(d)
        if waited_s > grace_s + LEAVE_S:
            saves = {w for w, c in d.contacts.items() if c.saving and waited_s < SAVING_S}
            staying = [m.id for m in d.training() if m.id not in saves]
            if d.coming is not None and d.coming.saves in staying:
                text = "%s does not leave: no checkpoint of the last steps, the newest one stands"
                d.log(text % d.coming.saves, "warning")
            evict(d, dict.fromkeys(staying, "it does not leave"))


def _resolve(d: Draft, generation: Generation) -> None:
    """All wait though they are connected: form the generation again; if that fails, with one less.

    The others get on without a joiner, so failed joins are counted for each joiner.
    """
    joiners: list[RunMember] = []
    if generation is d.coming:
        joiners = [replace(m, num_failed_joins=m.num_failed_joins + 1) for m in d.joiners()]
    for member in joiners:
        d.put(member)
    apart = [m.id for m in joiners if m.num_failed_joins >= MAX_MEETINGS]
    num_meetings = d.timing.num_meetings + 1
    if not apart and num_meetings > MAX_MEETINGS:
        num_meetings, apart = 0, [generation.roster[-1]]
    d.timing = replace(d.timing, num_meetings=num_meetings, linked_s=None)
    if apart:
        evict(d, dict.fromkeys(apart, "it cannot form a generation with the others"))
    else:
        meet_again(d, "all wait for each other")


def _watched(d: Draft) -> Generation | None:
    """The generation that the workers are in, or on their way into."""
    coming, running = d.coming, d.running
    if running is None or coming is None:
        return running or coming
    contacts = [d.contacts[w] for w in running.roster if w in d.contacts]
    return coming if any(c.generation == coming.number for c in contacts) else running


def _unblock(d: Draft) -> None:
    """A worker is stuck. Workers known to be gone are not waited for any longer."""
    if isinstance(d.phase, Changing) and d.phase.leaver_gone_s is not None:
        force(d)
    elif d.finishing and d.away:
        for worker in sorted(d.away):
            abandon(d, worker, "the others have trained to the end")
    elif d.finishing:
        go_on(d, {})
    elif d.parting and any(not d.trains(w) for w in d.roster):
        hurry(d)
    else:
        watch(d)


# Who is to blame.


def overdue(
    roster: Mapping[WorkerId, Contact],
    now_s: float,
    *,
    silent_s: float,
    patience_s: float,
    lease_s: float,
) -> dict[WorkerId, str]:
    """The workers to leave out of the next generation, and why.

    None while no worker that is heard from says it is stuck. Then the silent ones; else the only
    one that does not wait itself, once all others have waited for `patience_s`. If all are silent,
    it may be the coordinator that is cut off: all are given up when their lease is over.
    """
    if roster and all(now_s - c.heard_s > lease_s for c in roster.values()):
        return dict.fromkeys(roster, "silent, as all are, for longer than the lease")
    silent = {w: now_s - c.heard_s for w, c in roster.items() if now_s - c.heard_s > silent_s}
    complaints = [
        c.stuck_s if c.stuck_s is not None else c.heartbeat_s
        for w, c in roster.items()
        if w not in silent and _complains(c, now_s, patience_s)
    ]
    if not complaints:
        return {}
    if silent:
        return {w: f"silent for {s:.0f} s while others wait for it" for w, s in silent.items()}
    since_s = min(complaints)
    busy = [
        w
        for w, c in roster.items()
        if c.stuck_s is None and not (c.waiting and c.heartbeat_s >= since_s)
    ]
    if len(busy) != 1:
        return {}
    waited_s = min(_waits_s(c, now_s) for w, c in roster.items() if w != busy[0])
    late = roster[busy[0]]
    allowed_s = APART_S if late.apart else 0.0 if late.has_stepped else FIRST_STEP_S
    if waited_s < max(patience_s, allowed_s):
        return {}
    return {busy[0]: f"does not finish its step; all others have waited for {waited_s:.0f} s"}


def deadlocked(roster: Mapping[WorkerId, Contact], now_s: float, patience_s: float) -> bool:
    """Whether all are heard from and all wait, as when a connection between two broke."""
    contacts = roster.values()
    return len(roster) > 1 and all(_complains(c, now_s, patience_s) for c in contacts)


def suspicious(roster: Mapping[WorkerId, Contact], now_s: float, silent_s: float) -> bool:
    """Whether all wait, and one longer than a step can take."""
    return deadlocked(roster, now_s, silent_s) and any(
        c.stuck_s is not None for c in roster.values()
    )


def _complains(contact: Contact, now_s: float, patience_s: float) -> bool:
    # A worker says so once a generation. If it waits again, only its heartbeats tell.
    return contact.stuck_s is not None or _waits_s(contact, now_s) > patience_s


def _waits_s(contact: Contact, now_s: float) -> float:
    return now_s - contact.waiting_since_s if contact.waiting_since_s is not None else 0.0
