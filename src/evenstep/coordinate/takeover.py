"""Takes over a run from an earlier coordinator: workers reconnect, or are given up."""

from __future__ import annotations

from msgspec.structs import replace

from evenstep.coordinate import roster, steps
from evenstep.coordinate.announce import let_go, make_generation, pause
from evenstep.coordinate.draft import LEASE_MARGIN_S, Draft
from evenstep.coordinate.events import TookOver
from evenstep.coordinate.state import Changing, Doubt, Returning, Starting, Training
from evenstep.types import Regroup, WorkerId, listed

MAX_END_ANNOUNCEMENTS = 2  # at a step's end, and at once


def take_over(d: Draft, event: TookOver) -> None:
    """Go on with a run. Its workers may come back until their lease is over."""
    d.cluster = d.brain.cluster
    if event.stopping:  # the generation that announced the end is in no journal
        d.used_generation = max(d.used_generation, d.number + MAX_END_ANNOUNCEMENTS)
    if d.used_generation > d.number:
        # Records were lost: workers may train with others than those on record. All on
        # record meet anew, under a number that was never used.
        d.used_generation += 1
    d.skip_used_generations()
    d.facts = dict(event.facts)
    d.rostered.update(event.rostered)
    d.proven.update(event.previous_roster)
    d.progress = replace(d.progress, step=d.cluster.step)
    steps.known(d, d.cluster.step + 1, lease_s=event.lease_s)
    roster.reconcile(d, "the coordinator was restarted")
    missing = {}
    for worker in d.roster:
        if worker in event.ended:
            missing[worker] = "it ended with the coordinator"
        elif event.stopping:
            missing[worker] = "the run was stopping, and it was asked to leave"
    lease_s = max(d.terms.lease_s, event.lease_s) + LEASE_MARGIN_S
    d.phase = Returning(
        away=frozenset(d.roster) - missing.keys(),
        missing=missing,
        previous_roster=event.previous_roster,
        until_s=d.now_s + lease_s,
    )
    not_awaited = (d.roster if event.stopping else ()) or event.lost
    d.doubts = _doubts(event, not_awaited, d.now_s + lease_s)
    if d.away:
        d.log(
            f"waiting up to {lease_s:g} s for {listed(sorted(d.away))} to reconnect: they may "
            "still train. If you know that one has ended, `evenstep drain RUN WORKER` gives it up"
        )
    _resume_if_complete(d)


def _doubts(event: TookOver, roster: tuple[WorkerId, ...], until_s: float) -> dict[WorkerId, Doubt]:
    """Nobody waits for this roster to come back, and all of it may train on, or the one before."""
    doubts = {}
    for worker in roster:
        together = set(roster)
        if worker in event.previous_roster:
            together &= set(event.previous_roster)
        if together.isdisjoint(event.ended):
            doubts[worker] = Doubt(roster=tuple(sorted(together)), until_s=until_s)
    return doubts


def returned(d: Draft, worker: WorkerId, generation: int) -> None:
    """A worker of the newest roster is back; `generation`: that it has trained in, at most."""
    assert isinstance(d.phase, Returning)
    behind = {worker} if generation < d.number else set()
    d.phase = replace(d.phase, away=d.phase.away - {worker}, behind=d.phase.behind | behind)
    for published in d.published.values():  # before it was back
        d.send(published, worker)
    _resume_if_complete(d)


def abandon(d: Draft, worker: WorkerId, why: str) -> bool:
    """Do not wait for a worker to come back. False: nobody did."""
    if not isinstance(d.phase, Returning) or worker not in d.phase.away:
        return False
    missing = {**d.phase.missing, worker: why}
    d.phase = replace(d.phase, away=d.phase.away - {worker}, missing=missing)
    _resume_if_complete(d)
    return True


def check_lease(d: Draft) -> None:
    """Give up the workers that did not come back within their lease."""
    if isinstance(d.phase, Returning) and d.now_s >= d.phase.until_s:
        for worker in sorted(d.away):
            abandon(d, worker, "it did not come back within the lease")


def check_doubts(d: Draft) -> None:
    """Lost workers whose lease is over do not train any more."""
    d.doubts = {w: doubt for w, doubt in d.doubts.items() if d.now_s < doubt.until_s}


def adopt(d: Draft, worker: WorkerId) -> None:
    """A process outlived the coordinator that launched it. One out of the roster is leaving."""
    d.processes[worker] = replace(d.process(worker), running=True)
    d.has_launched = True
    if worker in d.rostered and worker not in d.roster:
        d.expect_no_more(worker)


def give_up(d: Draft, workers: tuple[WorkerId, ...]) -> None:
    """Workers of an earlier coordinator have ended: wait for them no longer."""
    for worker in workers:
        d.settle_doubts(worker)
        abandon(d, worker, "it ended while there was no coordinator")


def stop_without_away(d: Draft, why: str) -> None:
    """End the run in order, without the workers that are away."""
    for worker in sorted(d.away):
        d.evict_process(worker)
        abandon(d, worker, "the run is ending")
    roster.stop(d, why)


def _resume_if_complete(d: Draft) -> None:
    """Once all workers are back or given up: go on."""
    returning = d.phase
    if not isinstance(returning, Returning) or returning.away:
        return
    assert d.cluster is not None
    cluster, behind = d.cluster, returning.behind
    d.phase = Starting()
    if behind:  # the newest generation was announced, and has not begun
        for member in list(d.members.values()):
            d.put(replace(member, begun=member.id in returning.previous_roster))
    if returning.missing:
        roster.lose(d, returning.missing)
    elif cluster.plan is None:
        if cluster.roster:
            pause(d, "too few workers")
    elif behind and d.joiners():  # the others may be mid-step: they join later
        roster.go_on(d, {})
    else:
        regroup = Regroup(
            generation=cluster.generation, roster=cluster.roster, reason="announced again"
        )
        newest = make_generation(d, regroup, cluster.plan, planned=False)
        if behind:
            d.phase = Changing(running=None, coming=newest)
            d.send(newest, *sorted(behind))
        else:
            d.phase = Training(newest)
    assert d.cluster is not None
    for worker in sorted(d.cluster.draining):  # were asked to leave before
        if (asked := d.members.get(worker)) is not None:
            let_go(d, asked, "asked for before the coordinator was restarted")
    roster.advance(d)
