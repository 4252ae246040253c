"""How many workers, and which: the search and the stragglers turned into orders."""

from __future__ import annotations

from dataclasses import replace

from evenstep.config import WorkerSettings
from evenstep.decide.cluster import Cluster, Decision
from evenstep.decide.scaling.kind import kind_to_add, kinds_of, whom_to_drop
from evenstep.decide.scaling.search import look, observe, transition
from evenstep.decide.straggler import give_up, judge
from evenstep.types import Drain, Launch, Stay, StepDone, WorkerId

BLOCKED_LOOKS = 10  # after workers could not be started, before any are ordered again


def consider_size(cluster: Cluster, event: StepDone) -> Decision:
    """One step's word on the size of the cluster: workers ordered, sent home, or why neither."""
    if cluster.heuristic is None:
        return cluster, ()
    price_per_s = sum(w.price_per_hour for w in cluster.workers.values()) / 3600
    search = observe(
        cluster.search,
        len(cluster.workers),
        cluster.batch,
        event.steps.seconds,
        price_per_s,
        num_steps=event.steps.num,
    )
    scaling, limits = cluster.settings.scaling, cluster.settings.workers
    search, target, reason = look(
        search,
        scaling,
        WorkerSettings(min=max(limits.min, scaling.min_workers), max=limits.max),
        cluster.heuristic,
        samples_left=max(0, cluster.settings.samples - cluster.samples),
        waiting=cluster.launching > 0 or bool(cluster.draining),
    )
    cluster = replace(cluster, search=search)
    if target is not None:
        speed = {r.worker: r.samples / event.seconds for r in event.reports}
        return resize(cluster, target, reason, speed)
    return cluster, (Stay(reason=reason),) if reason else ()


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
    if straggler is None or straggler.id not in cluster.workers:
        surplus = len(cluster.workers) - len(cluster.draining) > cluster.target > 0
        return (
            resize(cluster, cluster.target, "more came than are wanted")
            if surplus
            else (
                cluster,
                (),
            )
        )
    joined = [w for w in cluster.ranks if w.id not in cluster.stragglers.peers]
    if not joined:
        return cluster, ()
    substitute = min(joined, key=lambda w: w.kind != straggler.kind)
    return drain(cluster, (straggler.id,), f"{substitute.id} has joined in its place")


def regrouped(cluster: Cluster) -> Cluster:
    """What was measured of the roster before does not mix with what follows."""
    return replace(cluster, search=transition(cluster.search, len(cluster.workers)))


def launch_failed(cluster: Cluster, num_workers: int, cause: str) -> Decision:
    """Workers that were ordered will not come: go on with those there are."""
    missed = min(num_workers, cluster.launching)
    reason = f"{missed} of {cluster.launching} ordered workers did not start: {cause}; going on"
    cluster = replace(cluster, launching=cluster.launching - missed)
    cluster = replace(cluster, search=replace(cluster.search, num_blocked_looks=BLOCKED_LOOKS))
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
    limits = cluster.settings.workers
    target = min(max(target, limits.min), limits.max)
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
