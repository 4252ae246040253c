"""Admits workers by name, and lets them join once they are ready and fit the run."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from evenstep.config import Settings
from evenstep.coordinate import steps
from evenstep.coordinate.announce import end
from evenstep.coordinate.draft import Draft
from evenstep.coordinate.events import CHECKPOINT, Connected, Ending, Reply
from evenstep.coordinate.exits import begun
from evenstep.coordinate.roster import advance, disconnect, leave_out
from evenstep.coordinate.state import Contact, RunMember, WorkerState
from evenstep.coordinate.takeover import returned
from evenstep.errors import BatchBoundsError, ConfigError, EvenstepError
from evenstep.messages import ALIKE, Ready, Refused, Welcome, differ
from evenstep.strict import build, override
from evenstep.types import Worker

EARLY = (WorkerState.STARTING, WorkerState.READY)


def connected(d: Draft, event: Connected) -> None:
    """Welcome a worker, or refuse it."""
    # Records of a generation above the newest were lost: do not use its number again.
    d.used_generation = max(d.used_generation, event.generation)
    if found := CHECKPOINT.search(event.checkpoint):
        steps.known(d, int(found[1]))
    _replace_connection(d, event)
    problem = _refusal(d, event)
    if problem:
        refused = Refused(why=problem, trained=d.has_trained_to_end)
        d.effects.append(Reply(message=refused))
        return
    worker, is_back = event.worker, event.worker in d.away
    if is_back:
        known = d.cluster.workers[worker] if d.cluster else None
        member = RunMember(id=worker, state=WorkerState.TRAINING, begun=True, worker=known)
    else:
        if not worker or worker in d.members:
            worker = d.new_name()
        member = RunMember(id=worker)
    d.put(replace(member, host=event.host, pid=event.pid, sees_folder=event.sees_folder))
    d.contacts[worker] = Contact(heard_s=d.now_s)
    begun(d, worker)
    welcome = Welcome(
        worker=worker,
        lease_s=d.terms.lease_s,
        silence_s=d.terms.silent_s,
        run=d.terms.run,
        term=d.terms.term,
        checkpoint_every_s=d.terms.checkpoint_every_s,
        checkpoints_kept=d.terms.checkpoints_kept,
        resume=event.checkpoint,
        underway=d.running is not None,
    )
    d.effects.append(Reply(message=welcome))
    if is_back:
        returned(d, worker, event.generation - event.forming)


def _replace_connection(d: Draft, event: Connected) -> None:
    """A worker that has not joined yet knows before the coordinator that its connection broke."""
    member = d.members.get(event.worker)
    if member is None or member.state not in EARLY:
        return
    if (member.host, member.pid) == (event.host, event.pid):
        d.hang_up(member.id)
        disconnect(d, member, "it connected again", dead=False)


def ready(d: Draft, member: RunMember, message: Ready) -> None:
    """A worker has started up. The first one brings the settings of the run."""
    try:
        worker = Worker(
            id=member.id,
            kind=message.kind,
            cores=message.cores,
            cap=message.cap,
            flops=dict(d.terms.flops).get(message.kind),
            price_per_hour=d.terms.price_of(message.kind),
        )
        if d.cluster is None:
            _begin_run(d, message)
        problem = _difference(d, message) or _too_many(d, member)
    except BatchBoundsError as e:  # no joiner can help: it would pause forever
        end(d, Ending(ok=False, why=str(e)))
        return
    except EvenstepError as e:
        problem = str(e)
    if problem:
        leave_out(d, member, problem)
        return
    if member.state is WorkerState.STARTING:
        sees_folder = message.sees_folder
        d.put(replace(member, state=WorkerState.READY, worker=worker, sees_folder=sees_folder))
        if d.first_ready_s is None:
            d.first_ready_s = d.now_s
        advance(d)


def make_settings(ready: Ready, sets: Sequence[str]) -> Settings:
    """Defaults, under the script's own settings, under the command line's."""
    settings = build(Settings, override(ready.settings, sets))
    own = {"size": ready.batch, "per_worker": ready.per_worker, "limit": ready.limit}
    for name, value in own.items():
        if getattr(settings.batch, name) != value:
            raise ConfigError(f"batch.{name}", f"is the script's own, {value}: set it there")
    return settings


def _begin_run(d: Draft, message: Ready) -> None:
    settings = make_settings(message, d.terms.sets)
    batch, num_workers = settings.batch, max(len(d.on_the_way()), settings.workers.min)
    largest, each = batch.size or batch.limit, min(batch.min_share, message.cap or batch.min_share)
    if each * num_workers > largest:  # it would pause forever: joiners need even more
        raise BatchBoundsError(largest, each * num_workers, largest, num_workers)
    facts = {name: getattr(message, name) for name in ALIKE}
    d.brain.begin(settings, facts)
    d.cluster, d.facts = d.brain.cluster, facts


def _difference(d: Draft, message: Ready) -> str:
    """The first fact in which a worker differs from the run, with both values; else empty."""
    own = {name: getattr(message, name) for name in ALIKE}
    shared = {**own, **d.facts}  # older journals lack newer facts
    for name in ALIKE:
        if own[name] != shared[name]:
            return f"{name} {differ(name, own[name], 'here', shared[name], 'in the run')}"
    d.facts = shared
    return ""


def _refusal(d: Draft, event: Connected) -> str:
    """Why a worker cannot come in; empty if it can."""
    if d.has_trained_to_end:
        return "the run has been trained to the end"
    if d.pausing:
        return "the last workers are leaving; try again"
    if d.closing is not None:
        return "the run is ending"
    if event.worker in d.away and event.generation <= d.number:
        return ""
    if event.generation > 0:
        return (
            f"{event.worker} of generation {event.generation} is not in the run, which is "
            f"at {d.number}; it can join as a new worker"
        )
    if event.worker in d.rostered:
        # It may have been told of a generation: under another name it would still go there.
        return f"{event.worker} was lost before it had joined; it can join as a new worker"
    num_members = sum(m.trains or m.state in EARLY for m in d.members.values())
    if not d.process(event.worker).running and num_members >= d.capacity:
        return _full(d)
    return ""


def _too_many(d: Draft, member: RunMember) -> str:
    """Why a joiner admitted before the batch size was known does not fit; empty if it does."""
    if member.state not in EARLY or d.process(member.id).running:
        return ""
    members = {m.id for m in d.members.values() if m.trains or m.state in EARLY}
    return _full(d) if len(members | d.on_the_way()) > d.capacity else ""


def _full(d: Draft) -> str:
    return f"the run is full: it has room for {d.capacity} workers"
