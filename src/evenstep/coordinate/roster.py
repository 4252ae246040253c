"""How the roster changes: planned changes one by one, losses at once.

A generation exists only if it is announced here. Numbers only grow, also over restarts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from msgspec.structs import replace

from evenstep.coordinate import links
from evenstep.coordinate import state as st
from evenstep.coordinate.announce import (
    all_leave,
    announce,
    announce_end,
    call_spares,
    dismiss,
    end,
    force,
    hurry,
    launch,
    let_go,
    make_generation,
    pause,
    send_plan,
    settle,
)
from evenstep.coordinate.draft import LEASE_MARGIN_S, Draft
from evenstep.coordinate.events import Ending, MarkStopping
from evenstep.coordinate.state import WorkerState
from evenstep.messages import Refused
from evenstep.types import (
    AnyAction,
    AnyEvent,
    Drain,
    Joined,
    Launch,
    LaunchFailed,
    Left,
    Lost,
    Pause,
    Plan,
    Regroup,
    Stay,
    WorkerId,
)


def advance(d: Draft) -> None:
    """Make the next planned change, unless one is under way."""
    while d.cluster and not (d.coming or d.away or d.finishing or d.ending):
        ready, leaving = d.in_states(WorkerState.READY), d.in_states(WorkerState.LEAVING)
        if d.stopping:
            announce_end(d)
            return
        if (reachable := links.reachable(d, ready)) and not d.gathers():
            if not _take_in(d, reachable):
                return
        elif leaving and len(leaving) == len(d.roster):
            if not ready and call_spares(d, 1, f"in place of {leaving[0].id}"):
                continue
            if d.on_the_way():
                return  # the state is handed over to the workers on their way first
            why = f"all workers leave: {leaving[0].leaves_because}"
            stop(d, why, pauses=d.terms.awaits_joiners)
        elif leaving:
            for member in leaving:
                d.put(replace(member, state=WorkerState.LEFT))
            ids = tuple(m.id for m in leaving)
            change(d, Left(workers=ids, cause=leaving[0].leaves_because), planned=True)
        else:
            return


def _take_in(d: Draft, ready: list[st.RunMember]) -> bool:
    """False: lost workers may still train, and none of them would be in this roster."""
    ready.sort(key=lambda m: (m.num_failed_joins, len(m.id), m.id))  # w2 before w10
    # A worker whose last join failed joins alone: this tells which of several cannot.
    ready = [m for m in ready if not m.num_failed_joins] or ready[:1]
    if d.others_may_train({m.id for m in (*d.training(), *ready)}):
        return False
    for member in ready:
        d.put(replace(member, state=WorkerState.TRAINING))
        d.rostered.add(member.id)
    workers = tuple(m.worker for m in ready if m.worker is not None)
    assert len(workers) == len(ready), "every ready worker has described itself"
    change(d, Joined(workers=workers), planned=True)
    return True


def stop(d: Draft, why: str, *, pauses: bool = False) -> None:
    """End the run in order, or pause it: at a step's end, with a checkpoint."""
    if d.pausing and not pauses:
        assert isinstance(d.closing, st.Stopping)
        d.log(f"stopping: {why}")
        d.closing = replace(d.closing, why=why, pauses=False)
    if d.stopping or d.ending is not None:
        settle(d)
        return
    d.log(f"{'pausing' if pauses else 'stopping'}: {why}")
    d.closing = st.Stopping(why=why, since_s=d.now_s, finishing=d.finishing, pauses=pauses)
    for member in d.in_states(WorkerState.STARTING, WorkerState.READY):
        dismiss(d, member, "the run is ending")
    advance(d)
    settle(d)


def suspend(d: Draft) -> None:
    """Once the last workers have left with a checkpoint, wait for others to go on from it."""
    if not d.pausing or d.training() or d.finishing:
        return
    assert isinstance(d.closing, st.Stopping)
    why = d.closing.why
    if d.coming is not None:  # the brain does not know the number under which they left
        d.used_generation = max(d.used_generation, d.coming.number)
        d.phase = st.Starting()
    d.closing = None
    d.effects.append(MarkStopping(stopping=False))
    obey(d, all_leave(d, why), planned=False)
    d.log("waiting for workers to join: `evenstep join`")


# Losses.


def lose(d: Draft, lost: Mapping[WorkerId, str]) -> None:
    """Workers are lost: the others go on at once without them; spares come in later."""
    left = False
    for worker, cause in lost.items():
        d.log(f"{worker} is lost: {cause}", "warning")
        d.last_loss = f"{worker} was lost: {cause}"
        d.processes[worker] = replace(d.process(worker), lost=True)
        member = d.remove(worker)
        if member is not None and member.state is WorkerState.LEAVING:
            d.expect_no_more(worker)  # it was leaving anyway: do not replace it
        left |= member is not None and member.state is WorkerState.LEFT and d.is_running(worker)
    if d.cluster is None:
        return
    known = {w: why for w, why in lost.items() if w in d.cluster.workers}
    if isinstance(d.phase, st.Returning):
        d.phase = replace(d.phase, missing={**d.phase.missing, **known})
    elif d.parting:
        hurry(d)
    elif known:
        for worker in known:
            leaving = d.process(worker).in_order
            if not leaving and call_spares(d, 1, f"in place of {worker}"):
                d.processes[worker] = replace(d.process(worker), relieved=True)
        go_on(d, known)
    elif left:
        force(d)


def doubt(d: Draft, worker: WorkerId) -> None:
    """Record that a lost worker may still train until its lease expires."""
    rosters = [set(g.roster) for g in (d.running, d.coming) if g is not None and worker in g.roster]
    if d.parting and worker in d.roster:  # the end that is announced has no roster
        rosters.append(set(d.roster))
    if rosters:
        until_s = d.contacts[worker].heard_s + d.terms.lease_s + LEASE_MARGIN_S
        roster = tuple(sorted(set.intersection(*rosters)))  # it may be in either
        d.doubts[worker] = st.Doubt(roster=roster, until_s=until_s)


def disconnect(d: Draft, member: st.RunMember, why: str, *, dead: bool) -> None:
    """A connection or its process has ended: a loss, unless nothing more was expected."""
    if member.trains and d.ending is None and (dead or not d.parting):
        lose(d, {member.id: why})
        return
    d.remove(member.id)
    over = (WorkerState.LEFT, WorkerState.DONE, WorkerState.SPARE)
    if member.trains or member.state in over:
        d.expect_no_more(member.id)
    if member.state is WorkerState.LEFT and d.is_running(member.id):
        # It may have gone at the very end of its last step, in order.
        if isinstance(d.phase, st.Changing):
            d.phase = replace(d.phase, leaver_gone_s=d.now_s)
        if dead:
            force(d)


def leave_out(d: Draft, member: st.RunMember, why: str, told: str = "") -> None:
    """Dismiss a worker that the run cannot use, with the reason; the others train on."""
    d.log(f"{member.id} is left out: {why}" + (f"\n{told.rstrip()}" if told else ""), "warning")
    d.processes[member.id] = replace(d.process(member.id), refused=why)
    d.send(Refused(why=why), member.id)
    d.hang_up(member.id)
    disconnect(d, member, why, dead=True)
    reconcile(d, why)


def go_on(d: Draft, lost: Mapping[WorkerId, str]) -> None:
    """The others go on at once, without the lost and those that have trained to the end."""
    if d.parting:  # all leave anyway
        hurry(d)
        return
    actions: tuple[AnyAction, ...] = ()
    finished: tuple[WorkerId, ...] = ()
    if d.finishing:
        if not d.training():
            return
        d.set_finishing(False)
        finished = tuple(w for w in d.roster if w not in lost and not d.trains(w))
        for member in d.in_states(WorkerState.DONE):
            dismiss(d, member, "trained to the end")
        actions = d.decide(Left(workers=finished, cause="trained to the end"))
    if joiners := _defer_joiners(d):
        actions = d.decide(Left(workers=joiners, cause="deferred: it joins later"))
    if lost:
        cause = next(iter(lost.values()))
        actions = d.decide(Lost(workers=tuple(lost), cause=cause))
    if finished and any(isinstance(action, Pause) for action in actions):
        end(d, Ending(ok=True, why="trained to the end"))
        return
    if not actions:
        force(d)  # the finished ones were to leave anyway, with the announced change
    obey(d, actions, planned=False)


def meet_again(d: Draft, why: str) -> None:
    """A new generation of the same workers: for the brain, one leaves and rejoins."""
    assert d.cluster is not None
    if d.joiners():
        go_on(d, {})  # the joiners come later
        return
    last = d.cluster.ranks[-1]
    d.decide(Left(workers=(last.id,), cause=why))
    change(d, Joined(workers=(last,)), planned=False)


def _defer_joiners(d: Draft) -> tuple[WorkerId, ...]:
    """Take joiners out of the roster, to join later.

    In a change at once the survivors may still be mid-step, and a joiner cannot take part in that
    step's all-reduces.
    """
    joiners = d.joiners()
    for member in joiners:
        if member.state is WorkerState.TRAINING:
            d.put(replace(member, state=WorkerState.READY))
        else:
            dismiss(d, member, member.leaves_because)
    return tuple(m.id for m in joiners)


# What the brain decides.


def change(d: Draft, event: AnyEvent, *, planned: bool) -> None:
    """Put an event to the brain and obey."""
    obey(d, d.decide(event), planned=planned)


def obey(d: Draft, actions: tuple[AnyAction, ...], *, planned: bool) -> None:
    """Turn the brain's actions into messages and launches."""
    regroup: Regroup | None = None
    for action in actions:
        match action:
            case Regroup():
                regroup = action
            case Plan():
                if regroup is not None:
                    announce(d, make_generation(d, regroup, action, planned=planned))
                elif d.running is not None:
                    send_plan(d, d.running, action)
            case Pause(reason=reason):
                pause(d, reason)
                if _is_overfull(d):  # more workers would make it worse
                    end(d, Ending(ok=False, why=reason))
                    return
            case Launch(kind=kind, reason=reason):
                launch(d, d.num_unlaunched(), reason, kind)
            case Drain(worker=worker, reason=reason, may_stay=may_stay):
                if member := d.members.get(worker):
                    member = replace(member, may_stay=may_stay)
                    d.put(member)
                    let_go(d, member, reason)
            case Stay():
                pass
            case _:
                assert_never(action)
    if any(isinstance(action, Drain | Launch) for action in actions):
        advance(d)


def begin(d: Draft) -> None:
    """The announced generation has begun."""
    assert d.coming is not None
    d.phase = st.Training(d.coming)
    for worker in d.phase.generation.roster:
        d.settle_doubts(worker)
    for member in list(d.members.values()):
        d.free(member.id)
        if d.is_running(member.id):
            d.put(replace(member, begun=True, num_failed_joins=0))
        if member.state is not WorkerState.LEFT:
            continue
        if member.id in d.phase.generation.spares:
            d.log(f"{member.id} stays as a spare")
            spare = replace(member, state=WorkerState.SPARE, may_stay=False)
            d.put(replace(spare, begun=False, reachable=False))
        else:
            dismiss(d, member, member.leaves_because)
    advance(d)


def reconcile(d: Draft, cause: str) -> None:
    """Tell the brain about ordered workers that will not come."""
    missing = d.num_unlaunched()
    if missing > 0:
        change(d, LaunchFailed(num_workers=missing, cause=cause), planned=True)


def _is_overfull(d: Draft) -> bool:
    """Whether the batch cannot give the workers of the roster their minimum."""
    if d.cluster is None:
        return False
    cluster = d.cluster
    min_share = cluster.settings.batch.min_share
    staying = [w for w in cluster.ranks if w.id not in cluster.draining]
    return sum(min(min_share, w.cap or min_share) for w in staying) > cluster.batch
