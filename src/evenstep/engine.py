"""Reports -> forecasts -> decide -> record: the loop that all three clocks share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from evenstep.config import Choice, Settings
from evenstep.decide.batching import POLICIES
from evenstep.decide.cluster import Cluster
from evenstep.decide.learning_rate import check_rule
from evenstep.decide.machine import decide
from evenstep.decide.scaling import HEURISTICS
from evenstep.decide.scaling.utility import Utility
from evenstep.errors import ConfigError, InvalidInputError
from evenstep.journal import Journal
from evenstep.ports import BatchPolicy, Foresees, ScalingHeuristic, look_up
from evenstep.predict import make_forecaster
from evenstep.strict import build
from evenstep.types import (
    AnyAction,
    AnyEvent,
    Fleet,
    FloatArray,
    Outcome,
    Plan,
    Stay,
    StepDone,
    WorkerId,
)


class Engine:
    """The brain with its forecaster and its journal, on whatever clock calls it."""

    def __init__(self, settings: Settings, journal: Journal | None = None) -> None:
        self.cluster = assemble(settings)
        self.journal = journal
        self._forecaster = make_forecaster(settings.forecaster.name, settings.forecaster.options)
        self._stays_because = ""
        self._outlook: dict[WorkerId, tuple[float, float]] = {}  # as the step at hand began

    def handle(self, at_s: float, event: AnyEvent) -> tuple[AnyAction, ...]:
        """Decide on an event and record both. An event that is refused leaves no trace."""
        if not math.isfinite(at_s):
            raise InvalidInputError("at_s", f"must be a time, got {at_s}")
        if isinstance(event, StepDone) and event.forecasts is None and self._is_news(event):
            event = self._foresee(event)
        cluster, decided = decide(self.cluster, event)
        actions, stays_because = without_repeats(decided, self._stays_because)
        if self.journal is not None:
            self.journal.append(at_s, event, actions)
        self.cluster, self._stays_because = cluster, stays_because
        return actions

    def _is_news(self, event: StepDone) -> bool:
        return event.generation == self.cluster.generation and self.cluster.is_newer(event)

    def _foresee(self, event: StepDone) -> StepDone:
        """The event with each worker's expected pace in the coming step, if anyone wants it."""
        policy, fleet = self.cluster.policy, self.cluster.fleet
        if not isinstance(policy, Foresees) or fleet is None:
            return event
        self._forecaster.seat(fleet.ids)
        pace = policy.pace(self.cluster.memory, fleet, Outcome.of(event, fleet))
        # A step's pace belongs to the outlook it began with, reported at the end of the one before.
        self._forecaster.learn(pace, self._column(fleet))
        self._outlook |= {r.worker: (r.free_cpu, r.free_memory) for r in event.reports}
        told = self._forecaster.forecast(self._column(fleet)).tolist()
        of = {w: f if math.isfinite(f) else None for w, f in zip(fleet.ids, told, strict=True)}
        forecasts = tuple(of.get(r.worker) for r in event.reports)
        return msgspec.structs.replace(event, forecasts=forecasts)

    def _column(self, fleet: Fleet) -> FloatArray:
        return np.array([self._outlook.get(w, (math.nan, math.nan)) for w in fleet.ids])


def without_repeats(
    actions: tuple[AnyAction, ...], stays_because: str
) -> tuple[tuple[AnyAction, ...], str]:
    """Actions without a Stay for the same reason as the last one, and the reason of the last one.

    The size is looked at every few steps, and mostly the answer is the same. A change of the
    cluster in between makes it news again.
    """
    kept: list[AnyAction] = []
    for action in actions:
        if isinstance(action, Stay):
            if action.reason == stays_because:
                continue
            stays_because = action.reason
        elif not isinstance(action, Plan):
            stays_because = ""
        kept.append(action)
    return tuple(kept), stays_because


def assemble(settings: Settings) -> Cluster:
    """An empty cluster with the policy and the heuristic that the settings name."""
    check_rule(settings.batch.lr_rule)
    policy: BatchPolicy = _plug("policy", "policies", settings.policy, POLICIES)
    heuristic: ScalingHeuristic | None = None
    chosen = settings.scaling.heuristic
    if chosen is not None:
        heuristic = _plug("scaling.heuristic", "heuristics", chosen, HEURISTICS)
        if isinstance(heuristic, Utility) and settings.samples <= 0:
            raise ConfigError("samples", "the utility heuristic needs the length of the job")
    return Cluster(settings=settings, policy=policy, heuristic=heuristic)


def _plug(setting: str, group: str, choice: Choice, built_in: Mapping[str, type[Any]]) -> Any:
    """The plug that was chosen, its options checked."""
    try:
        return build(look_up(group, choice.name, built_in), choice.options)
    except ConfigError as e:
        raise e.within(setting) from None
