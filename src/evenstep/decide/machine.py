"""`decide(cluster, event) -> (cluster, actions)`: the only place that changes state.

The match over events is exhaustive. A late event (a step of an earlier generation, the loss of a
worker already removed) changes nothing; an impossible one raises and leaves the state as it was.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

import numpy as np

from evenstep.decide.cluster import Cluster, Decision
from evenstep.decide.learning_rate import (
    GradientNoise,
    base_batch,
    lr_factor,
    observe_noise,
    step_noise,
)
from evenstep.decide.sizing import (
    consider_size,
    consider_stragglers,
    drain,
    drain_after_join,
    launch_failed,
    resize,
    restart_search,
)
from evenstep.errors import BatchBoundsError, InvalidInputError, PausedError, PlanError
from evenstep.types import (
    AnyEvent,
    DrainAsked,
    Fleet,
    IntArray,
    Joined,
    LaunchFailed,
    Left,
    Lost,
    Outcome,
    Pause,
    Plan,
    Regroup,
    Resumed,
    SizeAsked,
    StepDone,
    Worker,
    WorkerId,
    listed,
)

MIN_LR_CHANGE = 0.02  # relative; a smaller change of the learning rate gets no new plan


def decide(cluster: Cluster, event: AnyEvent) -> Decision:
    """One event in, the next state and the actions out."""
    match event:
        case StepDone():
            return _step(cluster, event)
        case Joined(workers=workers):
            return _joined(cluster, workers)
        case Left(workers=workers, cause=cause):
            return _removed(cluster, workers, "left", cause)
        case Lost(workers=workers, cause=cause):
            return _removed(cluster, workers, "lost", cause)
        case LaunchFailed(num_workers=num, cause=cause):
            return launch_failed(cluster, num, cause)
        case SizeAsked(num_workers=num):
            return resize(cluster, num, f"size {num} requested")
        case DrainAsked(worker=worker):
            if worker not in cluster.workers:
                known = listed(cluster.roster)
                raise InvalidInputError("drain", f"no worker {worker}; the workers are {known}")
            return drain(cluster, (worker,), "requested by an operator")
        case Resumed(generation=generation):
            return replace(cluster, generation=max(cluster.generation, generation)), ()
        case _:
            assert_never(event)


def _step(cluster: Cluster, event: StepDone) -> Decision:
    """Decide once per step, on all its reports: shares, then size, then stragglers."""
    if not cluster.is_newer(event) or event.generation > cluster.generation:
        return cluster, ()
    repeated = event.step <= cluster.furthest_step  # after a rollback: its samples were counted
    samples = cluster.samples + (0 if repeated else event.steps.samples)
    cluster = replace(
        cluster,
        step=event.step,
        step_generation=event.generation,
        furthest_step=max(cluster.furthest_step, event.step),
        samples=max(cluster.samples, event.position) if event.position else samples,
        noise=observe_noise(cluster.noise, _gradient_noise(event)),
    )
    fleet = cluster.fleet
    if fleet is None or event.generation < cluster.generation:
        return cluster, ()  # it counts, but was not measured on the current roster
    cluster, plans = _balance(cluster, fleet, event)
    cluster, sizes = consider_size(cluster, event)
    cluster, replacements = consider_stragglers(cluster, event)
    return cluster, (*plans, *sizes, *replacements)


def _gradient_noise(event: StepDone) -> GradientNoise | None:
    """The step's signal and noise, if every worker with a share reported a gradient norm."""
    norms = [r.grad_squared_norm for r in event.reports if r.samples > 0]
    if event.grad_squared_norm <= 0 or min(norms, default=0.0) <= 0:
        return None
    shares = [r.samples for r in event.reports if r.samples > 0]
    return step_noise(shares, norms, event.grad_squared_norm)


def _balance(cluster: Cluster, fleet: Fleet, event: StepDone) -> Decision:
    shares = np.array([cluster.shares[w] for w in fleet.ids], dtype=np.int64)
    outcome = Outcome.of(event, fleet)
    memory, move = cluster.policy.next(cluster.memory, fleet, cluster.batch, shares, outcome)
    cluster = replace(cluster, memory=memory)
    if move is not None:
        move = _checked(cluster, fleet, move[0]), move[1]
    if move is None or (move[0] == shares).all():
        move = _lr_only(cluster, shares)
        if move is None:
            return cluster, ()
    plan = _plan(cluster, fleet, *move)
    return replace(cluster, plan=plan), (plan,)


def _lr_only(cluster: Cluster, shares: IntArray) -> tuple[IntArray, str] | None:
    """The same shares, if the gradient noise calls for another AdaScale learning rate."""
    batch = cluster.settings.batch
    if batch.size or batch.lr_rule != "adascale" or cluster.plan is None:
        return None
    lr, _ = lr_factor(batch.lr_rule, cluster.batch, base_batch(batch), cluster.noise)
    if abs(lr / cluster.plan.lr_factor - 1) < MIN_LR_CHANGE:
        return None
    return shares, "shares unchanged"


def _joined(cluster: Cluster, workers: tuple[Worker, ...]) -> Decision:
    ids = [w.id for w in workers]
    seen = set(cluster.workers)
    for worker in ids:
        if worker in seen:
            raise InvalidInputError(
                "joined", f"worker {worker} exists already; give each worker a new id"
            )
        seen.add(worker)
    cluster = replace(
        cluster,
        workers={**cluster.workers, **{w.id: w for w in workers}},
        roster=(*cluster.roster, *ids),
        launching=max(0, cluster.launching - len(workers)),
        search=replace(cluster.search, num_failures=0),
    )
    cluster, actions = _regroup(cluster, f"{listed(ids)} joined")
    cluster, drains = drain_after_join(cluster)
    return cluster, (*actions, *drains)


def _removed(cluster: Cluster, workers: tuple[WorkerId, ...], verb: str, cause: str) -> Decision:
    removed = dict.fromkeys(w for w in workers if w in cluster.workers)
    if not removed:
        return cluster, ()
    cluster = replace(
        cluster,
        workers={i: w for i, w in cluster.workers.items() if i not in removed},
        roster=tuple(w for w in cluster.roster if w not in removed),
        draining=cluster.draining - removed.keys(),
    )
    return _regroup(cluster, f"{listed(list(removed))} {verb}" + (f": {cause}" if cause else ""))


def _regroup(cluster: Cluster, reason: str) -> Decision:
    """A new generation of all workers, with shares; or a pause, if they cannot train."""
    num, minimum = len(cluster.workers), cluster.settings.workers.min
    if num < minimum:
        return _pause(cluster, f"{reason}; {num} of the {minimum} workers needed")
    batch, min_share = cluster.batch, cluster.settings.batch.min_share
    fleet = Fleet.of(cluster.workers.values(), batch=batch, min_share=min_share)
    try:
        memory, (shares, why) = cluster.policy.first_shares(cluster.memory, fleet, batch)
    except (BatchBoundsError, PausedError) as e:
        return _pause(cluster, f"{reason}; {e}")
    cluster = replace(
        restart_search(cluster), generation=cluster.generation + 1, fleet=fleet, memory=memory
    )
    shares = _checked(cluster, fleet, shares)
    plan = _plan(cluster, fleet, shares, f"{reason}; {why}")
    regroup = Regroup(generation=cluster.generation, roster=cluster.roster, reason=reason)
    return replace(cluster, plan=plan), (regroup, plan)


def _pause(cluster: Cluster, reason: str) -> Decision:
    return replace(cluster, fleet=None, plan=None), (Pause(reason=reason),)


def _plan(cluster: Cluster, fleet: Fleet, shares: IntArray, reason: str) -> Plan:
    batch, settings = cluster.batch, cluster.settings
    lr, why = lr_factor(settings.batch.lr_rule, batch, base_batch(settings.batch), cluster.noise)
    return Plan(
        generation=cluster.generation,
        from_step=cluster.step + 1 + settings.plan_delay_steps,
        shares=dict(zip(fleet.ids, shares.tolist(), strict=True)),
        lr_factor=lr,
        reason=reason if settings.batch.size else f"{reason}; {why}",
    )


def _checked(cluster: Cluster, fleet: Fleet, shares: IntArray) -> IntArray:
    """The policy's shares; raises PlanError if they break the batch or a worker's bounds."""
    policy, shares = cluster.settings.policy.name, np.asarray(shares)
    if shares.shape != (len(fleet),) or shares.dtype.kind not in "iu":
        problem = f"gave {shares.tolist()}, not one integer for each of {len(fleet)} workers"
        raise PlanError(policy, problem)
    outside = (shares < fleet.lower) | (shares > fleet.upper)
    if outside.any():
        i = int(outside.argmax())
        share, lower, upper = int(shares[i]), int(fleet.lower[i]), int(fleet.upper[i])
        bound = "the batch" if cluster.workers[fleet.ids[i]].cap is None else "its cap"
        limit = f"more than {bound} of {upper}" if share > upper else f"under min_share, {lower}"
        raise PlanError(policy, f"gave worker {fleet.ids[i]} {share} samples, {limit}")
    if int(shares.sum()) != cluster.batch:
        raise PlanError(policy, f"assigned {shares.sum()} samples of a batch of {cluster.batch}")
    return shares
