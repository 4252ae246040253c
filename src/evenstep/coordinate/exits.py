"""What the end of a launched process means for the run."""

from __future__ import annotations

import signal
from enum import Enum

from msgspec.structs import replace

from evenstep.coordinate.announce import call_spares, end, launch, let_go, settle
from evenstep.coordinate.draft import Draft
from evenstep.coordinate.events import Dying, Ending, Exited, NotStarted, Preempted
from evenstep.coordinate.liveness import evict
from evenstep.coordinate.roster import advance, change, disconnect, leave_out, reconcile
from evenstep.coordinate.state import Ended, Exit, ProcessInfo, RunMember, WorkerState
from evenstep.coordinate.takeover import abandon
from evenstep.types import DrainAsked, LaunchFailed, WorkerId

REJOIN_CODE = 75  # os.EX_TEMPFAIL: the worker lost its place, through no fault of the script
# A process group still being released as the interpreter ends aborts a process that has finished.
ABORTED = -signal.SIGABRT
LAST_MESSAGE_S = 1.0  # between a process's end and the end of its connection


class Meaning(Enum):
    """What the end of a process means for the run."""

    FINE = "fine"  # nothing more was expected of it
    REPLACE = "replace"  # through no fault of the script
    FAILURE = "failure"  # the script's own
    MISSING = "missing"  # the run cannot use it; the others go on


def meaning(
    info: ProcessInfo, code: int, *, joined: bool, spared: bool, alone: bool, last: bool
) -> Meaning:
    """`joined`: it was in a roster. `spared`: the others go on if its script fails. `alone`: nobody
    else trains. `last`: no process runs.
    """
    if info.in_order:
        return Meaning.FINE
    if info.evicted or (code == REJOIN_CODE and not info.refused) or code < 0:
        return Meaning.REPLACE
    if code > 0:
        return Meaning.FAILURE if (joined and not spared) or alone else Meaning.MISSING
    if joined:
        return Meaning.REPLACE  # the others train on without it
    return Meaning.FAILURE if alone and last else Meaning.MISSING


def fails_late(info: ProcessInfo, code: int) -> bool:
    """Whether a process failed after the run was over, other than by the coordinator's signal."""
    if code < 0 and info.lost:
        return False  # the signal ended it during the run, and the others went on
    return code not in (0, REJOIN_CODE) and not (info.evicted or info.refused)


def describe_exit(code: int, *, joined: bool, why: str = "") -> str:
    """The end of a process in words, to be put after a worker's name. `why`: the engine's."""
    if why:
        return f"has ended: {why}"
    if code < 0:
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"
    if code == 0 and not joined:
        return "ended without joining the run: does the script call evenstep.join()?"
    if code == 0:
        return "ended with exit code 0 while the others train on"
    return f"ended with exit code {code}"


def spares_run(d: Draft, worker: WorkerId) -> bool:
    """Whether others train on if the script fails on a worker: they have taken steps, it has not.

    So the script is right, and what it lacks is missing on this worker's host.
    """
    proven = d.proven.intersection(m.id for m in d.training())
    return bool(proven) and worker not in d.proven


def script_failed(d: Draft, member: RunMember, told: str) -> None:
    """The script raised on a worker."""
    if spares_run(d, member.id):
        error = told.rstrip().rpartition("\n")[2]
        leave_out(d, member, f"its script failed before its first step: {error}", told)
    else:
        why = f"the script failed on {member.id}"
        end(d, Ending(ok=False, why=why, told=told, worker=member.id))


def noticed(d: Draft, member: RunMember, why: str) -> None:
    """A worker has to leave, say because its machine is taken away. It is replaced."""
    comes = (WorkerState.STARTING, WorkerState.READY, WorkerState.TRAINING)
    info = d.process(member.id)
    let_go(d, member, why)
    if member.state in comes and d.closing is None and not info.evicted:
        place = f"in place of {member.id}"
        if info.running:
            launch(d, 1, place)  # no restart is counted: the worker did not fail
        else:
            call_spares(d, 1, place)
    if member.state is WorkerState.TRAINING:  # the brain must not count on it any more
        change(d, DrainAsked(worker=member.id), planned=True)
    advance(d)


def check_finished(d: Draft, step: int) -> None:
    """The leader has reported a step. Nobody who has trained to the end takes part in one.

    Reports of the last steps may be under way while a worker says that it is done, but not for
    long.
    """
    for worker, finished in list(d.finished.items()):
        at = finished.step
        if at <= step:
            _ended_early(d, worker, f"its script ended at step {at} while the others train on")
        elif finished.doubted_s is None and d.is_running(worker):
            d.finished[worker] = replace(finished, doubted_s=d.now_s)
        elif d.is_running(worker) and d.now_s - (finished.doubted_s or 0.0) > d.terms.patience_s:
            why = f"it says that it trained to the end, step {at}, and all are at step {step} still"
            _ended_early(d, worker, why)


def _ended_early(d: Draft, worker: WorkerId, why: str) -> None:
    del d.finished[worker]
    d.log(f"{worker}: {why}", "warning")
    d.processes[worker] = info = replace(d.process(worker), refused=why)
    if d.is_in(worker, WorkerState.DONE) and d.is_running(worker):  # no step is taken without it
        d.expect_no_more(worker)
        evict(d, {worker: why})  # the run is not finishing any more
    if info.running or info.started_s is not None:
        _replace_worker(d, worker)
    else:
        call_spares(d, 1, f"in place of {worker}")


def _replace_worker(d: Draft, worker: WorkerId) -> None:
    """Call a spare or launch a worker, as long as there are restarts left."""
    place = f"in place of {worker}"
    if d.closing is not None or d.process(worker).relieved or call_spares(d, 1, place):
        return
    if d.restarts_left > 0:
        d.restarts_left -= 1
        launch(d, 1, place)


def dying(d: Draft, event: Dying) -> None:
    """A large process takes a while to exit: the others do not wait for it."""
    member = d.members.get(event.worker)
    if member is not None and d.ending is None:
        d.hang_up(event.worker)
        d.settle_doubts(event.worker)
        disconnect(d, member, f"it {describe_exit(-event.signal, joined=True)}", dead=True)
        settle(d)


def exited(d: Draft, event: Exited) -> None:
    """Judge the end of a process, or wait for its last message."""
    worker, code = event.worker, event.code
    info = replace(d.process(worker), running=False)
    d.processes[worker] = info
    if d.ending is not None:
        _exited_late(d, event, info)
        return
    d.processes[worker] = replace(info, exit=Exit(code, event.output, d.now_s, event.why))
    # A worker that ended by itself may have sent a message that is not read yet: the end of its
    # connection judges it, or a tick.
    if code < 0 or worker not in d.members:
        judge_exit(d, worker)
    settle(d)


def _exited_late(d: Draft, event: Exited, info: ProcessInfo) -> None:
    assert isinstance(d.closing, Ended)
    worker, code = event.worker, event.code
    if d.closing.ending.ok and worker in d.rostered and fails_late(info, code):
        why = f"{worker} {describe_exit(code, joined=True, why=event.why)}"
        d.log(f"{why}, after the run", "warning")
        if code != ABORTED:
            ending = Ending(ok=False, why=why, told=event.output, worker=worker)
            d.closing = replace(d.closing, ending=ending)


def check_exits(d: Draft) -> None:
    """Judge processes that have ended and whose connections stay open."""
    ended = {w: info.exit.at_s for w, info in d.processes.items() if info.exit is not None}
    for worker, at_s in sorted(ended.items(), key=lambda item: item[1]):
        if d.now_s - at_s > LAST_MESSAGE_S:
            judge_exit(d, worker)


def judge_exit(d: Draft, worker: WorkerId) -> None:
    """Act on the end of a launched process."""
    exit = d.process(worker).exit
    assert exit is not None
    d.processes[worker] = replace(d.process(worker), exit=None)
    d.settle_doubts(worker)
    joined = worker in d.rostered
    description = describe_exit(exit.code, joined=joined, why=exit.why)
    why = f"{worker} {description}"
    abandon(d, worker, f"it {description}")
    if member := d.members.get(worker):
        d.hang_up(worker)
        disconnect(d, member, f"it {description}", dead=True)
    info = d.process(worker)
    alone, last = not d.training(), not d.running_processes
    spared = spares_run(d, worker)
    match meaning(info, exit.code, joined=joined, spared=spared, alone=alone, last=last):
        case Meaning.FINE:
            if fails_late(info, exit.code):
                d.log(f"{why}; nothing more was expected of it", "warning")
            reconcile(d, why)
        case Meaning.FAILURE:
            why = f"{worker} was refused: {info.refused}" if info.refused else why
            end(d, Ending(ok=False, why=why, told=exit.output, worker=worker))
        case Meaning.REPLACE | Meaning.MISSING as verdict:
            if not info.refused:
                told = f"\n{exit.output.rstrip()}" if exit.code > 0 and exit.output else ""
                d.log(f"{why}{told}", "warning")
                d.last_loss = why
            if exit.code >= 0 and not (info.refused or info.evicted):
                d.processes[worker] = replace(info, refused=f"it {description}")
            # The brain orders a worker again if it never joined, unless nobody trains.
            if verdict is Meaning.REPLACE and (joined or alone or d.num_unlaunched() <= 0):
                _replace_worker(d, worker)
            reconcile(d, why)
    advance(d)  # workers that are to leave may have waited for it


def begun(d: Draft, worker: WorkerId) -> None:
    """The engine has started a worker: its start-up deadline counts from now."""
    info = d.process(worker)
    if info.queued:
        d.processes[worker] = replace(info, queued=False, started_s=d.now_s)


def preempted(d: Draft, event: Preempted) -> None:
    """A worker's host is about to go: it leaves at a step's end, and is replaced."""
    member, info = d.members.get(event.worker), d.process(event.worker)
    if d.ending is not None or info.in_order or info.evicted:
        return
    if member is not None:
        noticed(d, member, event.why)
        settle(d)


def not_started(d: Draft, event: NotStarted) -> None:
    """Workers could not be launched: tell the brain that they will not come."""
    for worker in event.workers:
        d.processes[worker] = replace(d.process(worker), running=False, queued=False)
    d.last_loss = f"a worker could not be started: {event.cause}"
    if d.num_unlaunched() > 0 or not d.roster:
        reconcile(d, event.cause)
    else:  # the brain did not order them, as in place of a lost one: it is for the journal
        failed = LaunchFailed(num_workers=len(event.workers), cause=event.cause)
        change(d, failed, planned=True)
    advance(d)
    settle(d)
