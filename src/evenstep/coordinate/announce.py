"""Messages to workers about a change: announced, forced, begun, paused, dismissed, called back."""

from __future__ import annotations

from msgspec.structs import replace

from evenstep.coordinate import state as st
from evenstep.coordinate.draft import Draft
from evenstep.coordinate.events import Ending, EndRun, MarkStopping, StartProcesses
from evenstep.coordinate.state import WorkerState
from evenstep.messages import Generation, Goodbye, NewPlan, Paused
from evenstep.types import AnyAction, Left, Lost, Plan, Regroup, WorkerId, listed


def make_generation(d: Draft, regroup: Regroup, plan: Plan, *, planned: bool) -> Generation:
    """The announcement of what the brain has decided."""
    assert d.cluster is not None
    batch = d.cluster.settings.batch
    return Generation(
        number=regroup.generation,
        roster=regroup.roster,
        shares=tuple(plan.shares[w] for w in regroup.roster),
        lr_factor=plan.lr_factor,
        lr_warmup_steps=batch.lr_warmup_steps,
        measures=batch.per_worker > 0 and batch.lr_rule == "adascale",
        # A leader passes a planned change on in a step, so somebody must train. The workers of the
        # first generation begin when they receive it.
        planned=planned and (d.running is not None or regroup.generation == 1),
        spares=_new_spares(d),
        saves=d.saver(regroup.roster),
        reason=regroup.reason,
    )


def announce(d: Draft, generation: Generation) -> None:
    """Send a generation to its workers and to those it leaves out."""
    d.log(f"generation {generation.number}: {generation.reason}")
    if d.terms.run and not generation.saves:
        d.log(f"no worker sees {d.terms.run}: nobody writes checkpoints", "warning")
    running = d.running if generation.planned else None
    d.phase = st.Changing(running=running, coming=generation)
    concerned = [m for m in d.members.values() if m.trains or m.state is WorkerState.LEFT]
    if not generation.planned:
        for member in concerned:
            d.free(member.id)
    # No leader passes it on to a joiner. A deferred joiner may already have begun as far
    # as it knows, and then obeys only a generation that holds at once.
    joins = {m.id: running is not None and not m.begun for m in concerned}
    d.send(generation, *(w for w, joining in joins.items() if not joining))
    d.send(replace(generation, planned=False), *(w for w, joining in joins.items() if joining))


def force(d: Draft) -> None:
    """A leaver is gone already: the announced change takes effect at once, not at a step's end."""
    if isinstance(d.phase, st.Changing):
        d.phase = replace(d.phase, leaver_gone_s=None)
        if d.phase.coming.planned:
            announce(d, replace(d.phase.coming, planned=False))


def send_plan(d: Draft, running: Generation, plan: Plan) -> None:
    """Send new shares for the present generation to its leader."""
    shares = tuple(plan.shares[w] for w in running.roster)
    message = NewPlan(
        generation=plan.generation, shares=shares, lr_factor=plan.lr_factor, reason=plan.reason
    )
    d.send(message, running.roster[0])


def pause(d: Draft, reason: str) -> None:
    """Pause: the workers keep their state and wait, and spares are called back."""
    assert d.cluster is not None
    d.log(f"paused: {reason}", "warning")
    if d.doubts:
        left_s = max(doubt.until_s for doubt in d.doubts.values()) - d.now_s
        d.log(
            f"newcomers wait up to {left_s:.0f} s: {listed(sorted(d.doubts))} may still train. If "
            "you know that one has ended, `evenstep drain RUN WORKER` gives it up"
        )
    d.phase = st.Suspended(reason)
    training = d.training()
    for member in training:
        d.free(member.id)
    d.send(Paused(reason=reason), *(m.id for m in training))
    for member in d.in_states(WorkerState.LEFT):
        dismiss(d, member, member.leaves_because)
    # Below the minimum, call as many as are missing; else the batch may need just one more.
    lacking = max(1, d.cluster.settings.workers.min - len(d.cluster.workers))
    call_spares(d, lacking - len(d.in_states(WorkerState.READY)), reason)


def let_go(d: Draft, member: st.RunMember, why: str) -> None:
    """Drain a worker: at a step's end if it trains, else at once."""
    idle = (WorkerState.STARTING, WorkerState.READY, WorkerState.SPARE)
    if member.state is WorkerState.TRAINING or member.state in idle:
        d.log(f"draining {member.id}: {why}")
    if member.state is WorkerState.TRAINING:
        d.put(replace(member, state=WorkerState.LEAVING, leaves_because=why))
    elif member.state in idle:
        dismiss(d, member, why)


def dismiss(d: Draft, member: st.RunMember, why: str) -> None:
    """Tell a worker that it may end."""
    d.put(replace(member, state=WorkerState.DISMISSED))
    d.expect_no_more(member.id)
    d.send(Goodbye(why=why, trained=d.has_trained_to_end), member.id)


def launch(d: Draft, num_workers: int, reason: str, kind: str = "") -> None:
    """Call spares back, and launch processes for the rest."""
    num_workers -= call_spares(d, num_workers, reason, kind)
    if num_workers <= 0:
        return
    what = "worker" if num_workers == 1 else "workers"
    what += f" of kind {kind}" if kind else ""
    d.log(f"launching {num_workers} {what}: {reason}")
    names = []
    for _ in range(num_workers):
        names.append(name := d.new_name())
        queued = d.terms.queues
        d.processes[name] = st.ProcessInfo(running=True, started_s=d.now_s, queued=queued)
    d.has_launched = True
    d.effects.append(StartProcesses(workers=tuple(names), kind=kind, reason=reason))


def call_spares(d: Draft, num_workers: int, reason: str, kind: str = "") -> int:
    """Let up to `num_workers` spares come back; returns how many do."""
    if d.closing is not None:
        return 0
    fitting = [
        m for m in d.in_states(WorkerState.SPARE) if m.worker and kind in ("", m.worker.kind)
    ]
    called = fitting[: max(0, num_workers)]
    for member in called:
        d.log(f"{member.id} comes back: {reason}")
        d.put(replace(member, state=WorkerState.READY))
    return len(called)


def _new_spares(d: Draft) -> tuple[WorkerId, ...]:
    """Workers that leave with the generation being made and stay connected."""
    free = d.terms.spares - len(d.in_states(WorkerState.SPARE))
    leaving = [m.id for m in d.in_states(WorkerState.LEFT) if m.may_stay]
    return tuple(leaving[: max(0, free)])


# The end of the run.


def announce_end(d: Draft) -> None:
    """Announce the end: a planned change like any other, to an empty roster."""
    assert isinstance(d.closing, st.Stopping)
    d.closing = replace(d.closing, announced=True, since_s=d.now_s)
    d.effects.append(MarkStopping())
    generation = Generation(
        number=d.number + 1,
        roster=(),
        shares=(),
        planned=d.running is not None and d.coming is None,
        saves=d.saver(d.roster),
        reason=d.stopping,
    )
    announce(d, generation)


def hurry(d: Draft) -> None:
    """The step in flight will not end, so all leave at once."""
    if d.coming is not None and d.coming.planned:
        d.log("the step in flight does not end: all workers leave at once", "warning")
        number, saves = d.coming.number + 1, d.saver(d.roster)
        announce(d, replace(d.coming, number=number, planned=False, saves=saves))


def settle(d: Draft) -> None:
    """End the run if there is nothing left to wait for."""
    if d.ending is not None or d.away:
        return
    training = d.training()
    if d.pausing and d.finishing and not training:
        d.closing = st.Finishing()
        end(d, Ending(ok=True, why="trained to the end"))
    elif d.stopping:
        if not (training or d.pausing):
            end(d, Ending(ok=True, why=f"stopped: {d.stopping}"))
    elif d.finishing:
        # Do not wait for a change that was announced but not passed on.
        if not any(d.running is None or d.is_running(m.id) for m in training):
            end(d, Ending(ok=True, why="trained to the end"))
    elif d.has_launched and not (d.terms.awaits_joiners or d.expects_workers()):
        end(d, Ending(ok=False, why=f"no worker is left; {d.last_loss}"))


def all_leave(d: Draft, why: str) -> tuple[AnyAction, ...]:
    """Empty the roster. A resumed run waits only for those that may train on."""
    actions: tuple[AnyAction, ...] = ()
    may_train_on = d.doubts.keys() | d.away
    silent = tuple(w for w in d.roster if w in may_train_on)
    if left := tuple(w for w in d.roster if w not in may_train_on):
        actions = d.decide(Left(workers=left, cause=why))
    if silent:
        actions = d.decide(Lost(workers=silent, cause=why))
    return actions


def end(d: Draft, ending: Ending) -> None:
    """End the run now."""
    if d.ending is not None:
        return
    d.log(f"the run ends: {ending.why}")
    d.closing = st.Ended(ending=ending, stopped_because=d.stopping)
    all_leave(d, ending.why)
    d.effects.append(EndRun(ending=ending))
    for member in list(d.members.values()):
        if member.state is not WorkerState.DISMISSED and member.id != ending.worker:
            dismiss(d, member, ending.why)
