"""How many workers, and which: the search and the stragglers turned into orders."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import inf

from evenstep.config import WorkerSettings
from evenstep.decide.cluster import Cluster, Decision
from evenstep.decide.learning import global_batch, most_workers
from evenstep.decide.scaling.kind import kind_to_add, kinds_of, whom_to_drop
from evenstep.decide.scaling.search import Size, look, observe, transition
from evenstep.decide.straggler import give_up, judge
from evenstep.types import Drain, Launch, Stay, StepDone, WorkerId

BLOCKED_LOOKS = 10  # after workers could not be started, before any are ordered again
MOST_DOUBLINGS = 6


def consider_size(cluster: Cluster, event: StepDone) -> Decision:
    """One step's word on the size of the cluster: workers ordered, sent home, or why neither."""
    heuristic = cluster.heuristic
    if heuristic is None:
        return cluster, ()
    settings, steps = cluster.settings, event.steps
    measured = Size(
        num_workers=len(cluster.workers),
        samples=steps.samples,
        seconds=steps.seconds,
        price_per_s=sum(w.price_per_hour for w in cluster.workers.values()) / 3600,
        batch=cluster.batch,
        num_steps=steps.num,
    )
    waiting = cluster.launching > 0 or bool(cluster.draining)
    search = observe(cluster.search, measured, waiting=waiting)
    cluster = replace(cluster, search=search)
    samples_left = max(0, settings.samples - cluster.samples)
    if settings.samples and not samples_left:
        return cluster, ()  # nothing is worth a change any more
    bounds = size_bounds(cluster)
    least = min(max(bounds.min, settings.scaling.min_workers), bounds.max)
    search, target, reason = look(
        search,
        settings.scaling,
        WorkerSettings(min=least, max=bounds.max),
        heuristic,
        samples_left=samples_left,
        waiting=waiting,
    )
    cluster = replace(cluster, search=search)
    if target is not None:
        speed = {r.worker: r.samples / event.seconds for r in event.reports}
        return resize(cluster, target, reason, speed)
    if not reason:
        return cluster, ()
    return replace(cluster, target=len(cluster.workers)), (Stay(reason=reason),)


def size_bounds(cluster: Cluster) -> WorkerSettings:
    """The fewest that hold the batch under their caps, and the most that it can be shared among.

    Who would leave is not known, so the fewest are counted with the smallest caps.
    """
    limits, batch = cluster.settings.workers, cluster.settings.batch
    most = min(limits.max, most_workers(batch))
    caps = sorted(inf if w.cap is None else w.cap for w in cluster.workers.values())
    sums = enumerate(accumulate(caps), start=1)
    held = (n for n, held in sums if held >= global_batch(batch, n))
    return WorkerSettings(min=min(max(limits.min, next(held, len(caps))), most), max=most)


def consider_stragglers(cluster: Cluster, event: StepDone) -> Decision:
    """One step's word on who is too slow: a substitute ordered, or why nobody is replaced now."""
    staying = [w for w in cluster.ranks if w.id not in cluster.draining]
    memory, straggler, reason = judge(
        cluster.stragglers,
        cluster.settings.straggler,
        staying,
        event.reports,
        num_steps=event.steps.num,
    )
    cluster = replace(cluster, stragglers=memory)
    if straggler is None:
        return cluster, (Stay(reason=reason),) if reason else ()
    order = Launch(num_workers=1, kind=cluster.workers[straggler].kind, reason=reason)
    return replace(cluster, launching=cluster.launching + 1), (order,)


def relieve(cluster: Cluster) -> Decision:
    """Workers have joined: the straggler one was ordered for may go, and who is too many by now."""
    straggler = cluster.stragglers.leaving
    if straggler is not None and straggler.id in cluster.workers:
        joined = [w for w in cluster.ranks if w.id not in cluster.stragglers.peers]
        alike = [w for w in joined if w.kind == straggler.kind]
        if alike:
            return drain(cluster, (straggler.id,), f"{alike[0].id} has joined in its place")
        if cluster.launching or not joined:
            return cluster, ()
        # What came is of another kind, and may be the slower one: nobody is replaced by it.
        gave_up = give_up(cluster.stragglers, cluster.settings.straggler)
        cluster = replace(cluster, stragglers=gave_up)
    if len(cluster.workers) - len(cluster.draining) > cluster.target > 0:
        return resize(cluster, cluster.target, "more came than are wanted")
    return cluster, ()


def regrouped(cluster: Cluster) -> Cluster:
    """What was measured of the roster before does not mix with what follows."""
    return replace(cluster, search=transition(cluster.search, len(cluster.workers)))


def launch_failed(cluster: Cluster, num_workers: int, cause: str) -> Decision:
    """Workers that were ordered will not come: go on with those there are.

    Each time in a row that none came it takes twice as long until any are ordered again.
    """
    missed = min(num_workers, cluster.launching)
    reason = f"{missed} of {cluster.launching} ordered workers did not start: {cause}; going on"
    failures = cluster.search.num_failures
    blocked = replace(
        cluster.search,
        num_failures=failures + 1,
        num_blocked_looks=BLOCKED_LOOKS << min(failures, MOST_DOUBLINGS),
    )
    cluster = replace(cluster, launching=cluster.launching - missed, search=blocked)
    if cluster.stragglers.leaving is not None and cluster.launching == 0:
        gave_up = give_up(cluster.stragglers, cluster.settings.straggler)
        cluster = replace(cluster, stragglers=gave_up)
    return cluster, (Stay(reason=reason),)


def resize(
    cluster: Cluster, target: int, reason: str, speed: dict[WorkerId, float] | None = None
) -> Decision:
    """Order workers, or send some home, until `target` are there or on their way.

    Which kind comes or goes is chosen by what it brings for its price, where `speed` (samples per
    second in the last step) is known; else the last in rank go.
    """
    bounds = size_bounds(cluster)
    within = min(max(target, bounds.min), bounds.max)
    if within != target:
        target, reason = within, f"{reason}; {bounds.min} to {bounds.max} are possible: {within}"
    cluster = replace(cluster, target=target)
    staying = [w for w in cluster.ranks if w.id not in cluster.draining]
    size = len(staying) + cluster.launching
    kinds = kinds_of(staying, speed or {})
    if target > size:
        kind, why = kind_to_add(kinds.values()) if len(kinds) > 1 else ("", "")
        order = Launch(num_workers=target - size, kind=kind, reason=_both(reason, why))
        return replace(cluster, launching=cluster.launching + order.num_workers), (order,)
    # Who is still on the way cannot be called back: it is let go again when it has come.
    gone, why = whom_to_drop(staying, kinds, max(0, len(staying) - target))
    return drain(cluster, gone, _both(reason, why if len(kinds) > 1 else ""), may_stay=True)


def drain(
    cluster: Cluster, workers: tuple[WorkerId, ...], reason: str, *, may_stay: bool = False
) -> Decision:
    """Ask workers to leave. One that was asked already is not asked twice."""
    new = tuple(w for w in workers if w not in cluster.draining)
    cluster = replace(cluster, draining=cluster.draining | set(new))
    return cluster, tuple(Drain(worker=w, reason=reason, may_stay=may_stay) for w in new)


def _both(reason: str, why: str) -> str:
    return f"{reason}; {why}" if why else reason
