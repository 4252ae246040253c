"""How many workers, and which: turns the size search and straggler detection into actions."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import inf

from evenstep.config import WorkerSettings
from evenstep.decide.cluster import Cluster, Decision
from evenstep.decide.learning_rate import global_batch, max_workers
from evenstep.decide.scaling.kind import kind_to_add, kinds_of, workers_to_drop
from evenstep.decide.scaling.search import Size, look, observe, transition
from evenstep.decide.straggler import give_up, judge
from evenstep.types import Drain, Launch, Stay, StepDone, WorkerId, counted

BACKOFF_LOOKS = 10  # looks without a launch after the first failed launch
MAX_DOUBLINGS = 6


def consider_size(cluster: Cluster, event: StepDone) -> Decision:
    """Update the size search with a step: launch or drain workers, or say why not."""
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
        return cluster, ()  # the job is done: no change can pay off
    bounds = size_bounds(cluster)
    min_workers = min(max(bounds.min, settings.scaling.min_workers), bounds.max)
    search, target, reason = look(
        search,
        settings.scaling,
        WorkerSettings(min=min_workers, max=bounds.max),
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
    """The fewest workers whose caps hold the batch, and the most that it can be split among.

    Which workers would leave is unknown, so the fewest are counted from the smallest caps up.
    """
    limits, batch = cluster.settings.workers, cluster.settings.batch
    maximum = min(limits.max, max_workers(batch))
    caps = sorted(inf if w.cap is None else w.cap for w in cluster.workers.values())
    totals = enumerate(accumulate(caps), start=1)
    enough = (n for n, total in totals if total >= global_batch(batch, n))
    return WorkerSettings(min=min(max(limits.min, next(enough, len(caps))), maximum), max=maximum)


def consider_stragglers(cluster: Cluster, event: StepDone) -> Decision:
    """Update straggler detection with a step: launch a substitute, or say why not."""
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


def drain_after_join(cluster: Cluster) -> Decision:
    """After a join: drain the straggler it replaces, or workers beyond the target size."""
    straggler = cluster.stragglers.leaving
    if straggler is not None and straggler.id in cluster.workers:
        joined = [w for w in cluster.ranks if w.id not in cluster.stragglers.roster_when_named]
        substitutes = [w for w in joined if w.kind == straggler.kind]
        if substitutes:
            return drain(cluster, (straggler.id,), f"replaced by {substitutes[0].id}")
        if cluster.launching or not joined:
            return cluster, ()
        # The joiner is of another kind and may be even slower: keep the straggler.
        gave_up = give_up(cluster.stragglers, cluster.settings.straggler)
        cluster = replace(cluster, stragglers=gave_up)
    if len(cluster.workers) - len(cluster.draining) > cluster.target > 0:
        return resize(cluster, cluster.target, "more workers joined than needed")
    return cluster, ()


def restart_search(cluster: Cluster) -> Cluster:
    """The roster has changed: steps before and after must not be averaged together."""
    return replace(cluster, search=transition(cluster.search, len(cluster.workers)))


def launch_failed(cluster: Cluster, num_workers: int, cause: str) -> Decision:
    """Workers failed to start: continue without them, with exponential back-off of launches."""
    failed = min(num_workers, cluster.launching)
    which = f"{failed} of {cluster.launching} launched workers" if failed else counted(num_workers)
    reason = f"{which} did not start: {cause}; continuing without them"
    failures = cluster.search.num_failures
    search = replace(
        cluster.search,
        num_failures=failures + 1,
        num_backoff_looks=BACKOFF_LOOKS << min(failures, MAX_DOUBLINGS),
    )
    cluster = replace(cluster, launching=cluster.launching - failed, search=search)
    if cluster.stragglers.leaving is not None and cluster.launching == 0:
        gave_up = give_up(cluster.stragglers, cluster.settings.straggler)
        cluster = replace(cluster, stragglers=gave_up)
    return cluster, (Stay(reason=reason),)


def resize(
    cluster: Cluster, target: int, reason: str, speed: dict[WorkerId, float] | None = None
) -> Decision:
    """Launch or drain workers until `target` are running or starting.

    The kind to add or drop is chosen by samples per price where `speed` (samples per second in the
    last step) is known; otherwise the last in rank are drained.
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
        order = Launch(num_workers=target - size, kind=kind, reason=_with_why(reason, why))
        return replace(cluster, launching=cluster.launching + order.num_workers), (order,)
    # Launches in flight cannot be cancelled: surplus workers are drained after they join.
    dropped, why = workers_to_drop(staying, kinds, max(0, len(staying) - target))
    return drain(cluster, dropped, _with_why(reason, why if len(kinds) > 1 else ""), may_stay=True)


def drain(
    cluster: Cluster, workers: tuple[WorkerId, ...], reason: str, *, may_stay: bool = False
) -> Decision:
    """Ask workers to leave, except those that were asked already."""
    new = tuple(w for w in workers if w not in cluster.draining)
    cluster = replace(cluster, draining=cluster.draining | set(new))
    return cluster, tuple(Drain(worker=w, reason=reason, may_stay=may_stay) for w in new)


def _with_why(reason: str, why: str) -> str:
    return f"{reason}; {why}" if why else reason
