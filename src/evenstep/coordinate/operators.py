"""Requests of operators, and the status of the run that they see."""

from __future__ import annotations

from typing import Any

import msgspec

from evenstep.coordinate import state as st
from evenstep.coordinate.announce import launch, let_go, settle
from evenstep.coordinate.draft import Draft
from evenstep.coordinate.events import Reply, ScaleAsked, StartAsked, WorkerDrainAsked
from evenstep.coordinate.roster import change
from evenstep.coordinate.state import RunState, WorkerState
from evenstep.coordinate.takeover import abandon
from evenstep.decide.cluster import Cluster
from evenstep.errors import EvenstepError, InvalidInputError
from evenstep.messages import Answer
from evenstep.types import DrainAsked, SizeAsked, WorkerId, listed


def start(d: Draft, event: StartAsked) -> None:
    """Launch the first workers; for a resumed run, up to the size it was last asked for.

    An explicit number counts for more than that size.
    """
    num_workers, target = event.num_workers, d.cluster.target if d.cluster else 0
    if num_workers > d.capacity:
        d.log(f"the run has room for {d.capacity} workers, not for {num_workers}", "warning")
        num_workers = d.capacity
    here = {w for w in d.running_processes if not d.process(w).in_order}
    if target and not event.explicit:
        launch(d, target - len(here | d.away), "asked for")
    else:
        launch(d, num_workers - len(here), "asked for")
        if num_workers and target not in (0, num_workers):
            change(d, SizeAsked(num_workers=num_workers), planned=True)
    settle(d)


def answer(d: Draft, event: ScaleAsked | WorkerDrainAsked) -> None:
    """Do what an operator asks for, and answer."""
    try:
        if isinstance(event, ScaleAsked):
            reply = Answer(told=_scale(d, event.num_workers))
        else:
            _drain(d, event.worker)
            reply = Answer()
    except EvenstepError as e:
        reply = Answer(problem=str(e))
    d.effects.append(Reply(message=reply))


def _scale(d: Draft, num_workers: int) -> dict[str, Any]:
    fewest, most = d.terms.min_workers, d.capacity
    if not fewest <= num_workers <= most:
        raise InvalidInputError(
            "scale", f"this run has {fewest} to {most} workers, got {num_workers}"
        )
    _open_cluster(d, "scale")
    change(d, SizeAsked(num_workers=num_workers), planned=True)
    assert d.cluster is not None
    return {"num_workers": d.cluster.target}


def _drain(d: Draft, worker: WorkerId) -> None:
    if abandon(d, worker, "an operator gave it up"):
        return
    if worker in d.doubts:
        d.settle_doubts(worker)
        return
    member = d.members.get(worker)
    if member is None:
        connected = listed(list(d.members)) or "none"
        raise InvalidInputError("drain", f"no worker {worker}; there are {connected}")
    if member.state is not WorkerState.TRAINING:
        let_go(d, member, "asked for")
        return
    cluster = _open_cluster(d, "drain")
    fewest = cluster.settings.workers.min
    staying = sum(d.is_in(w, WorkerState.TRAINING) for w in cluster.roster) - 1
    if staying < fewest:
        raise InvalidInputError(
            "drain", f"{staying} of at least {fewest} workers would be left; stop the run"
        )
    change(d, DrainAsked(worker=worker), planned=True)


def _open_cluster(d: Draft, what: str) -> Cluster:
    if d.cluster is None:
        raise InvalidInputError(what, "no worker is ready yet; ask again")
    if d.closing is not None:
        raise InvalidInputError(what, "the run is ending")
    return d.cluster


# What they see.


def status(state: RunState, now_s: float) -> dict[str, Any]:
    """The run: its phase, its speed, and one row for each worker."""
    cluster, running = state.cluster, state.running
    roster = running.roster if running else cluster.roster if cluster else ()
    number = running.number if running else cluster.generation if cluster else 0
    rank = {worker: i for i, worker in enumerate(roster)}
    ids = dict.fromkeys((*roster, *state.members, *sorted(state.running_processes)))
    return {
        "run": state.terms.run,
        "state": _phase_name(state),
        "reason": _reason(state),
        "trained_to_end": isinstance(state.closing, st.Ended) and state.closing.has_trained_to_end,
        "generation": number,
        "step": state.progress.step,
        "samples_per_s": state.progress.throughput.samples_per_s(now_s, number),
        "restarts_left": state.restarts_left,
        "settings": msgspec.to_builtins(cluster.settings) if cluster else {},
        "workers": [_row(state, worker, rank.get(worker)) for worker in ids],
        "left_out": {w: info.refused for w, info in state.processes.items() if info.refused},
    }


def _row(state: RunState, worker: WorkerId, rank: int | None) -> dict[str, Any]:
    member = state.members.get(worker)
    report = state.progress.reports.get(worker) if member else None
    return {
        "worker": worker,
        "rank": rank,
        "share": report.samples if report and rank is not None else 0,
        "compute_s": report.compute_s if report else 0.0,
        "wait_s": report.wait_s if report else 0.0,
        "state": _worker_state(state, worker),
        "host": member.host if member else "",
        "pid": member.pid if member else 0,
    }


def _phase_name(state: RunState) -> str:
    match state.closing, state.phase:
        case st.Ended(), _:
            return "ended"
        case st.Stopping(), _:
            return "stopping"
        case st.Finishing(), _:
            return "finishing"
        case None, st.Returning():
            return "waiting for workers to come back"
        case None, st.Suspended():
            return "paused"
        case None, st.Starting():
            return "starting"
    return "training" if state.running else "regrouping"


def _reason(state: RunState) -> str:
    """Why the run is paused or stopping; empty if it is neither."""
    match state.phase, state.closing:
        case st.Suspended(reason), _:
            return reason
        case _, st.Stopping(why=reason) | st.Ended(stopped_because=reason):
            return reason
        case st.Starting(), None if not (state.members or state.running_processes):
            return "no worker has joined yet: start them by `evenstep join`"
    return ""


def _worker_state(state: RunState, worker: WorkerId) -> str:
    if worker in state.away:
        return "away"
    member = state.members.get(worker)
    if member is None:
        if worker not in state.running_processes or worker in state.rostered:
            return "gone"
        return "queued" if state.processes[worker].queued else "starting"
    return "stuck" if state.contacts[worker].stuck_s is not None else member.state.value
