"""`decide(cluster, event) -> (cluster, actions)`: the one door for state.

The match over events is exhaustive. Late news (a report of a former generation, the loss of a
worker already gone) changes nothing; news that cannot be true raises and leaves all as it was.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

import numpy as np

from evenstep.decide.cluster import Cluster, Decision
from evenstep.decide.learning import (
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
    launch_failed,
    regrouped,
    relieve,
    resize,
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
    SizeAsked,
    StepDone,
    Worker,
    WorkerId,
    listed,
)

RATE_MOVED = 0.02  # a learning rate that moves by less is left as it is


def decide(cluster: Cluster, event: AnyEvent) -> Decision:
    """One event in, the next state and the orders out."""
    match event:
        case StepDone():
            return _step(cluster, event)
        case Joined(workers=workers):
            return _joined(cluster, workers)
        case Left(workers=gone, cause=cause):
            return _gone(cluster, gone, "left", cause)
        case Lost(workers=gone, cause=cause):
            return _gone(cluster, gone, "lost", cause)
        case LaunchFailed(num_workers=num, cause=cause):
            return launch_failed(cluster, num, cause)
        case SizeAsked(num_workers=num):
            return resize(cluster, num, f"{num} workers asked for")
        case DrainAsked(worker=worker):
            if worker not in cluster.workers:
                there = listed(cluster.roster)
                raise InvalidInputError("drain", f"no worker {worker}; there are {there}")
            return drain(cluster, (worker,), "asked for")
        case _:
            assert_never(event)


def _step(cluster: Cluster, event: StepDone) -> Decision:
    """Decide once on all of a step's reports: shares, then size, then stragglers."""
    if not cluster.is_news(event) or event.generation > cluster.generation:
        return cluster, ()
    again = event.step <= cluster.furthest_step  # from an older checkpoint: trained on before
    counted = cluster.samples + (0 if again else event.steps.samples)
    cluster = replace(
        cluster,
        step=event.step,
        step_generation=event.generation,
        furthest_step=max(cluster.furthest_step, event.step),
        samples=max(cluster.samples, event.position) if event.position else counted,
        noise=observe_noise(cluster.noise, _noise(event)),
    )
    fleet = cluster.fleet
    if fleet is None or event.generation < cluster.generation:
        return cluster, ()  # it counts, but says nothing of the roster that there is now
    cluster, plans = _balance(cluster, fleet, event)
    cluster, sizes = consider_size(cluster, event)
    cluster, replacements = consider_stragglers(cluster, event)
    return cluster, (*plans, *sizes, *replacements)


def _noise(event: StepDone) -> GradientNoise | None:
    """Signal and noise of a step's gradient, if all who had a share measured theirs."""
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
        move = _new_rate(cluster, shares)
        if move is None:
            return cluster, ()
    plan = _plan(cluster, fleet, *move)
    return replace(cluster, plan=plan), (plan,)


def _new_rate(cluster: Cluster, shares: IntArray) -> tuple[IntArray, str] | None:
    """The same shares, if what is known of the gradients' noise asks for another learning rate."""
    batch = cluster.settings.batch
    if batch.size or batch.lr_rule != "adascale" or cluster.plan is None:
        return None
    lr, _ = lr_factor(batch.lr_rule, cluster.batch, base_batch(batch), cluster.noise)
    if abs(lr / cluster.plan.lr_factor - 1) < RATE_MOVED:
        return None
    return shares, "shares as they are"


def _joined(cluster: Cluster, workers: tuple[Worker, ...]) -> Decision:
    ids = [w.id for w in workers]
    seen = set(cluster.workers)
    for worker in ids:
        if worker in seen:
            raise InvalidInputError(
                "joined", f"there is a worker {worker} already; ids are for life"
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
    cluster, drains = relieve(cluster)
    return cluster, (*actions, *drains)


def _gone(cluster: Cluster, gone: tuple[WorkerId, ...], how: str, cause: str) -> Decision:
    known = dict.fromkeys(w for w in gone if w in cluster.workers)
    if not known:
        return cluster, ()
    cluster = replace(
        cluster,
        workers={i: w for i, w in cluster.workers.items() if i not in known},
        roster=tuple(w for w in cluster.roster if w not in known),
        draining=cluster.draining - known.keys(),
    )
    return _regroup(cluster, f"{listed(list(known))} {how}" + (f": {cause}" if cause else ""))


def _regroup(cluster: Cluster, reason: str) -> Decision:
    """A new generation of the workers there are, with shares; or a pause, if they cannot train."""
    num, least = len(cluster.workers), cluster.settings.workers.min
    if num < least:
        return _pause(cluster, f"{reason}; {num} of at least {least} workers")
    batch, min_share = cluster.batch, cluster.settings.batch.min_share
    fleet = Fleet.of(cluster.workers.values(), batch=batch, min_share=min_share)
    try:
        memory, (shares, why) = cluster.policy.seat(cluster.memory, fleet, batch)
    except (BatchBoundsError, PausedError) as e:
        return _pause(cluster, f"{reason}; {e}")
    cluster = replace(
        regrouped(cluster), generation=cluster.generation + 1, fleet=fleet, memory=memory
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
    """The policy's shares, if they keep the batch and every worker's bounds; else PlanError."""
    policy, shares = cluster.settings.policy.name, np.asarray(shares)
    if shares.shape != (len(fleet),) or shares.dtype.kind not in "iu":
        told = f"gave {shares.tolist()}, not one whole number for each of {len(fleet)} workers"
        raise PlanError(policy, told)
    outside = (shares < fleet.lower) | (shares > fleet.upper)
    if outside.any():
        i = int(outside.argmax())
        share, lower, upper = int(shares[i]), int(fleet.lower[i]), int(fleet.upper[i])
        bound = "the batch" if cluster.workers[fleet.ids[i]].cap is None else "its cap"
        than = f"more than {bound} of {upper}" if share > upper else f"less than min_share, {lower}"
        raise PlanError(policy, f"gave worker {fleet.ids[i]} {share} samples, {than}")
    if int(shares.sum()) != cluster.batch:
        told = f"gave out {shares.sum()} samples of a batch of {cluster.batch}"
        raise PlanError(policy, told)
    return shares
