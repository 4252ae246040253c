"""Reports -> forecasts -> decide -> record: the loop shared by real runs, simulator and replay."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from evenstep.config import Choice, Settings
from evenstep.decide.batching import POLICIES
from evenstep.decide.cluster import Cluster
from evenstep.decide.estimate import Estimator
from evenstep.decide.learning_rate import check_rule
from evenstep.decide.machine import decide
from evenstep.decide.scaling import HEURISTICS
from evenstep.decide.scaling.utility import Utility
from evenstep.errors import ConfigError, InvalidInputError
from evenstep.journal import Journal, Record
from evenstep.ports import BatchPolicy, Foresees, ScalingHeuristic, look_up
from evenstep.predict import make_forecaster
from evenstep.strict import build, within
from evenstep.types import (
    AnyAction,
    AnyEvent,
    Estimate,
    Fleet,
    FloatArray,
    Outcome,
    Plan,
    Stay,
    StepDone,
    WorkerId,
)

log = logging.getLogger("evenstep")

Paces = tuple[float | None, ...]
"""In the order of a step's reports: the speeds that the forecasts before it were of."""


class Engine:
    """The brain with its forecaster and journal; the caller supplies the clock."""

    def __init__(self, settings: Settings) -> None:
        self.cluster = assemble(settings)
        self.journal: Journal | None = None
        self.is_watched = False  # people look at it, with or without a journal
        self.newest: Record | None = None  # as it is in the journal
        self._estimator: Estimator | None = Estimator()  # None: it has failed
        self._forecaster = make_forecaster(settings.forecaster.name, settings.forecaster.options)
        self._last_stay_reason = ""
        self._outlook: dict[WorkerId, tuple[float, float]] = {}  # at the start of this step

    def handle(self, at_s: float, event: AnyEvent) -> tuple[AnyAction, ...]:
        """Decide on an event and record both. A rejected event changes nothing."""
        if not math.isfinite(at_s):
            raise InvalidInputError("at_s", f"must be finite, got {at_s}")
        paces: Paces | UnsetType = UNSET
        if isinstance(event, StepDone):
            event, paces = self._with_forecasts(event)
        cluster, decided = decide(self.cluster, event)
        actions, stay_reason = without_repeats(decided, self._last_stay_reason)
        estimate = self._estimate(event, cluster) if self.is_watched or self.journal else None
        record = Record(
            at_s=at_s, event=event, actions=actions, estimate=estimate or UNSET, paces=paces
        )
        if self.journal is not None:
            self.journal.write(record)
        self.cluster, self._last_stay_reason, self.newest = cluster, stay_reason, record
        return actions

    def _estimate(self, event: AnyEvent, cluster: Cluster) -> Estimate | None:
        """For people, now and then. A mistake there is no reason to stop anything."""
        if self._estimator is None or not isinstance(event, StepDone):
            return None
        try:
            return self._estimator.add(event, cluster)
        except Exception:
            self._estimator = None
            log.exception("the limit of the throughput is not estimated any more")
            return None

    def _with_forecasts(self, event: StepDone) -> tuple[StepDone, Paces | UnsetType]:
        """The event with a forecast of each worker's speed, if the policy uses forecasts."""
        policy, fleet = self.cluster.policy, self.cluster.fleet
        is_late = event.generation != self.cluster.generation or not self.cluster.is_newer(event)
        if event.forecasts is not None or is_late:
            return event, UNSET
        if not isinstance(policy, Foresees) or fleet is None:
            return event, UNSET
        self._forecaster.set_roster(fleet.ids)
        speed = policy.pace(self.cluster.memory, fleet, Outcome.of(event, fleet))
        # A step's speed belongs to the outlook at its start, which came with the previous reports.
        self._forecaster.learn(speed, self._outlooks(fleet))
        self._outlook |= {r.worker: (r.free_cpu, r.free_memory) for r in event.reports}
        column = self._forecaster.forecast(self._outlooks(fleet)).tolist()
        workers = [r.worker for r in event.reports]
        forecasts = _by_worker(fleet.ids, column, workers)
        paces = _by_worker(fleet.ids, [float(f"{s:.5g}") for s in speed.tolist()], workers)
        return msgspec.structs.replace(event, forecasts=forecasts), paces

    def _outlooks(self, fleet: Fleet) -> FloatArray:
        return np.array([self._outlook.get(w, (math.nan, math.nan)) for w in fleet.ids])


def _by_worker(
    ids: Sequence[WorkerId], column: Sequence[float], workers: Sequence[WorkerId]
) -> Paces:
    """A fleet's column in the order of some workers; None for what is not finite."""
    known = {w: s if math.isfinite(s) else None for w, s in zip(ids, column, strict=True)}
    return tuple(known.get(worker) for worker in workers)


def without_repeats(
    actions: tuple[AnyAction, ...], last_reason: str
) -> tuple[tuple[AnyAction, ...], str]:
    """The actions without a Stay that repeats the last one's reason, and the new last reason.

    The size search runs every few steps and mostly gives the same answer. Any action other than a
    Plan resets it.
    """
    kept: list[AnyAction] = []
    for action in actions:
        if isinstance(action, Stay):
            if action.reason == last_reason:
                continue
            last_reason = action.reason
        elif not isinstance(action, Plan):
            last_reason = ""
        kept.append(action)
    return tuple(kept), last_reason


def assemble(settings: Settings) -> Cluster:
    """An empty cluster with the policy and heuristic named in the settings."""
    check_rule(settings.batch.lr_rule)
    policy: BatchPolicy = _plugin("policy", "policies", settings.policy, POLICIES)
    heuristic: ScalingHeuristic | None = None
    chosen = settings.scaling.heuristic
    if chosen is not None:
        heuristic = _plugin("scaling.heuristic", "heuristics", chosen, HEURISTICS)
        if isinstance(heuristic, Utility) and settings.samples <= 0:
            raise ConfigError("samples", "must be set: utility needs the length of the job")
    return Cluster(settings=settings, policy=policy, heuristic=heuristic)


def _plugin(setting: str, group: str, choice: Choice, built_in: Mapping[str, type[Any]]) -> Any:
    """The chosen plug-in, with validated options."""
    with within(setting):
        return build(look_up(group, choice.name, built_in), choice.options)
