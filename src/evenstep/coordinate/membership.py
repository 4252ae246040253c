"""`membership(state, input, now_s, brain) -> (state, effects)`: who takes part in a run.

There is no socket, clock, file or process in here: a driver says what happened and what time it is,
and performs the effects. The brain answers within a call, so a replay needs only its journal. An
input that raises InvalidInputError cannot be true, and leaves everything as it was.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import asdict, replace

from evenstep import messages as msg
from evenstep.coordinate import events as ev
from evenstep.coordinate import exits, joining, links, liveness, operators, steps, takeover
from evenstep.coordinate.announce import dismiss, end, settle
from evenstep.coordinate.draft import Decides, Draft
from evenstep.coordinate.events import Ending
from evenstep.coordinate.roster import advance, begin, disconnect, doubt, obey, suspend
from evenstep.coordinate.state import Completion, Ended, Progress, RunMember, RunState, WorkerState
from evenstep.errors import PlanError
from evenstep.types import StepDone, WorkerId

LEASE = msg.Lease()
MAX_PUBLISHED = 40  # keys per worker and generation: one or two per group and process


def membership(
    state: RunState, event: ev.AnyInput, now_s: float, brain: Decides
) -> tuple[RunState, tuple[ev.AnyEffect, ...]]:
    """One input in, the next state and the orders out."""
    if isinstance(event, ev.Heard) and isinstance(event.message, msg.Alive):
        return _alive(state, event.worker, event.message, now_s, brain)
    d = Draft.of(RunState() if isinstance(event, ev.Opened) else state, now_s, brain)
    try:
        _handle(d, event)
    except PlanError as e:  # the first shares of a roster are wrong: there are none to go on with
        end(d, Ending(ok=False, why=str(e)))
    return d.state(), tuple(d.effects)


def _alive(
    state: RunState, worker: WorkerId, alive: msg.Alive, now_s: float, brain: Decides
) -> tuple[RunState, tuple[ev.AnyEffect, ...]]:
    """A heartbeat: a thousand of them a second must be cheap, so no draft is made."""
    read_s = state.timing.clock_read_s
    if read_s is None or now_s - read_s > liveness.OWN_LAG_S:
        d = Draft.of(state, now_s, brain)
        liveness.read_clock(d)
        state = d.state()
    timing = replace(state.timing, clock_read_s=now_s)
    if worker not in state.members:
        return replace(state, timing=timing), ()
    contact = liveness.heartbeat(state.contacts[worker], alive, now_s)
    state = replace(state, timing=timing, contacts={**state.contacts, worker: contact})
    return state, (ev.Send(workers=(worker,), message=LEASE),)


def _handle(d: Draft, event: ev.AnyInput) -> None:
    match event:
        case ev.Opened(terms=terms, next_name=next_name, generation=generation):
            d.terms, d.next_name, d.restarts_left = terms, next_name, terms.restarts
            d.used_generation = generation
        case ev.Heard(worker=worker, message=message):
            _heard(d, worker, message)
        case ev.Tick():
            _tick(d)
        case ev.Connected():
            joining.connected(d, event)
        case ev.Disconnected(worker=worker, broken=broken):
            _disconnected(d, worker, broken=broken)
        case ev.Dying():
            exits.dying(d, event)
        case ev.Exited():
            exits.exited(d, event)
        case ev.Begun(workers=workers):
            for worker in workers:
                exits.begun(d, worker)
        case ev.Preempted():
            exits.preempted(d, event)
        case ev.NotStarted():
            exits.not_started(d, event)
        case ev.StartAsked():
            operators.start(d, event)
        case ev.ScaleAsked() | ev.WorkerDrainAsked():
            operators.answer(d, event)
        case ev.StopAsked(why=why):
            takeover.stop_without_away(d, why)
            d.effects.append(ev.Reply(message=msg.Answer()))
        case ev.KillAsked(why=why):
            end(d, Ending(ok=False, why=why))
        case ev.EvictAsked(workers=workers):
            for worker in workers:
                d.evict_process(worker)
        case ev.TookOver():
            takeover.take_over(d, event)
        case ev.Adopted(worker=worker):
            takeover.adopt(d, worker)
        case ev.Gone(workers=workers):
            takeover.give_up(d, workers)
        case ev.Crashed(why=why, traceback=traceback):
            d.closing = Ended(ending=Ending(ok=False, why=why, told=traceback))
            d.effects.append(ev.EndRun(ending=d.closing.ending))
        case _:
            assert_never(event)


def _heard(d: Draft, worker: WorkerId, message: msg.FromClient) -> None:
    liveness.read_clock(d)
    member = d.members.get(worker)
    if member is None:
        return
    d.contacts[worker] = replace(d.contacts[worker], heard_s=d.now_s)
    if d.ending is None:
        _listen(d, member, message)
        settle(d)


def _disconnected(d: Draft, worker: WorkerId, *, broken: bool) -> None:
    if not broken:
        d.settle_doubts(worker)
    member = d.members.get(worker)
    if member is None:
        advance(d)
        return
    if broken:
        doubt(d, worker)
    disconnect(d, member, "its connection broke" if broken else "its connection closed", dead=False)
    if d.process(worker).exit is not None:
        exits.judge_exit(d, worker)
    settle(d)


def _tick(d: Draft) -> None:
    if d.ending is not None:
        return
    liveness.read_clock(d)
    takeover.check_lease(d)
    takeover.check_doubts(d)
    exits.check_exits(d)
    liveness.check_leaver(d)
    liveness.check_start_up(d)
    liveness.judge_links(d)
    liveness.watch(d)
    suspend(d)
    advance(d)
    settle(d)


def _listen(d: Draft, member: RunMember, message: msg.FromClient) -> None:
    match message:
        case msg.Ready():
            joining.ready(d, member, message)
        case msg.Publish():
            _publish(d, member, message)
        case msg.Began(generation=number, step=step):
            if _leads(member, d.coming, number) and _can_be(d, member, step):
                d.log(f"generation {number} began at step {step}")
                steps.known(d, step)
                begin(d)
        case msg.Stepped():
            _stepped(d, member, message)
        case msg.Stuck():
            liveness.stuck(d, member.id, message)
        case msg.Listening():
            links.listening(d, member.id, message)
            liveness.judge_links(d)
        case msg.Reached():
            links.reached(d, member.id, message)
            liveness.judge_links(d)
        case msg.Leaving(why=why):
            exits.noticed(d, member, why)
        case msg.Done(step=step):
            _done(d, member, step)
        case msg.Failed(told=told):
            exits.script_failed(d, member, told)
        case msg.Alive() | msg.Hello() | msg.Ask():
            pass  # handled before, or not expected now
        case _:
            assert_never(message)


def _done(d: Draft, member: RunMember, step: int) -> None:
    others = any(m.id != member.id for m in d.training())
    unused = (WorkerState.STARTING, WorkerState.READY, WorkerState.SPARE)
    if others and member.state in unused:
        dismiss(d, member, "it had nothing to do")
        return
    if not _can_be(d, member, step):
        return
    d.put(replace(member, state=WorkerState.DONE))
    d.finished[member.id] = Completion(step=step)
    d.set_finishing(True)
    d.progress = replace(d.progress, step=max(d.progress.step, step))


def _can_be(d: Draft, member: RunMember, step: int) -> bool:
    """Whether a worker can be at this step; else it is left out, as nothing it says is believed."""
    if not (why := steps.doubt_number(d, step)):
        return True
    d.log(f"{member.id} is left out: {why}", "warning")
    d.processes[member.id] = replace(d.process(member.id), refused=why)
    liveness.evict(d, {member.id: why})
    return False


def _publish(d: Draft, member: RunMember, message: msg.Publish) -> None:
    """Pass on to the others of the newest generation where a worker can be reached."""
    if message.generation != d.number or member.id not in d.roster:
        return  # a newer generation replaces that one
    current = {k: p for k, p in d.published.items() if p.generation == d.number}
    if sum(worker == member.id for worker, _ in current) >= MAX_PUBLISHED:
        liveness.evict(d, {member.id: "it publishes more than a process group needs"})
        return
    published = msg.Published(generation=d.number, key=message.key, value=message.value)
    d.published = {**current, (member.id, message.key): published}
    d.send(published, *(w for w in d.roster if w != member.id and w in d.members))


def _stepped(d: Draft, member: RunMember, message: msg.Stepped) -> None:
    done = StepDone(**{k: v for k, v in asdict(message).items() if k != "nonfinite"})
    generation = d.coming if _leads(member, d.coming, message.generation) else d.running
    if d.cluster is None or generation is None or not _leads(member, generation, done.generation):
        return
    if not _can_be(d, member, message.step):
        return
    steps.check_report(d, generation, message)
    if generation is d.coming:
        begin(d)
    steps.known(d, message.step + 1, generation=message.generation)
    steps.note_faulty(d, generation, message)
    workers = [r.worker for r in message.reports]
    liveness.stepped(d, message.seconds, workers)
    d.proven.update(workers)
    own = max(0, done.quiet.samples - done.earlier.samples)  # of this generation
    taken = replace(done, quiet=replace(done.quiet, samples=own)).steps
    reports = {**d.progress.reports, **{r.worker: r for r in message.reports}}
    d.progress = Progress(
        step=message.step,
        reports={w: report for w, report in reports.items() if w in d.members},
        throughput=d.progress.throughput.add(d.now_s, done.generation, taken),
    )
    obey(d, d.decide(done), planned=True)
    exits.check_finished(d, message.step)


def _leads(member: RunMember, generation: msg.Generation | None, number: int) -> bool:
    if generation is None or generation.number != number:
        return False
    return generation.roster[:1] == (member.id,)
