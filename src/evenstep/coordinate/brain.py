"""The engine of a run: made at the first Ready, asked in moderation, restored from its journal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from evenstep.config import BatchSettings, Settings
from evenstep.decide.cluster import Cluster
from evenstep.engine import Engine
from evenstep.errors import BatchBoundsError, ConfigError, JournalError, PlanError
from evenstep.journal import Journal, read
from evenstep.messages import ALIKE, Ready, differ
from evenstep.pace import MeanTimes, Pacer, SkippedSteps
from evenstep.strict import build, override
from evenstep.types import AnyAction, AnyEvent, Joined, Plan, StepDone, StepReport, WorkerId

log = logging.getLogger("evenstep")

Timer = Callable[[], float]
"""Seconds that this thread has computed for."""


class Brain:
    """Decides for one run. What it is told goes to the journal first."""

    def __init__(self, engine: Engine, facts: dict[str, Any], timer: Timer) -> None:
        self._engine, self._facts, self._timer = engine, facts, timer
        self._pace = Pacer()
        self._balances = True
        self._means, self._tally = MeanTimes(), SkippedSteps()

    @classmethod
    def begin(
        cls,
        ready: Ready,
        sets: Sequence[str],
        journal: Callable[[Settings, dict[str, Any]], Journal | None],
        timer: Timer,
        *,
        num_workers: int = 1,
    ) -> Brain:
        """The brain of a new run, by its first worker and the command line.

        Raises BatchBoundsError if the batch cannot be shared among `num_workers`, or workers.min.
        """
        engine = Engine(settings_of(ready, sets))
        settings = engine.cluster.settings
        _check_room(settings.batch, max(num_workers, settings.workers.min), ready.cap)
        facts = {name: getattr(ready, name) for name in ALIKE}
        engine.journal = journal(settings, {"facts": facts})
        return cls(engine, facts, timer)

    @classmethod
    def restore(cls, path: Path, timer: Timer) -> Restored:
        """The brain of a run that goes on."""
        journal = Journal.resume(path)
        try:
            header, records = read(path)
            engine, clock_s = Engine(header.settings), 0.0
            used: set[WorkerId] = set()
            before: tuple[WorkerId, ...] = ()
            for record in records:
                was = engine.cluster
                engine.handle(record.at_s, record.event)
                clock_s = max(clock_s, record.at_s)
                if engine.cluster.generation > was.generation:
                    before = was.roster
                if isinstance(record.event, Joined):
                    used.update(w.id for w in record.event.workers)
        except BaseException:
            journal.close()
            raise
        engine.journal = journal
        brain = cls(engine, header.about.get("facts", {}), timer)
        return Restored(brain=brain, clock_s=clock_s, used=used, before=before)

    @property
    def cluster(self) -> Cluster:
        """What it knows."""
        return self._engine.cluster

    def differs(self, ready: Ready) -> str:
        """What a worker has otherwise than the run, with both values; empty if nothing."""
        told = {name: getattr(ready, name) for name in ALIKE}
        known = {**told, **self._facts}  # older journals lack what is new
        for name in ALIKE:
            if told[name] != known[name]:
                return f"{name} {differ(name, told[name], 'here', known[name], 'in the run')}"
        self._facts = known
        return ""

    def handle(self, at_s: float, event: AnyEvent) -> tuple[AnyAction, ...]:
        """Decide. If the journal cannot be written any more, the run goes on without it."""
        begun_s = self._timer()
        try:
            actions = self._engine.handle(at_s, event)
        except JournalError as e:
            log.error("%s; the run goes on, but nobody can take it over", e)
            self.close()
            actions = self._engine.handle(at_s, event)
        moved = any(isinstance(action, Plan) for action in actions)
        self._pace.decided(self._timer() - begun_s, moved=moved)
        return actions

    def step(self, at_s: float, done: StepDone) -> tuple[AnyAction, ...]:
        """Decide on a step if it is worth it. A mistake here ends balancing, not training."""
        if not self._balances:
            return ()
        try:
            return self._step(at_s, done)
        except PlanError as e:
            log.error("the balancer has stopped, shares stay: %s", e)
            self._balances = False
            return ()
        except Exception:
            log.exception("the balancer has stopped, shares stay")
            self._balances = False
            return ()

    def _step(self, at_s: float, done: StepDone) -> tuple[AnyAction, ...]:
        num, samples = done.steps.num, [r.samples for r in done.reports]
        compute_s = [r.compute_s for r in done.reports]
        spread_s = [r.spread_s for r in done.reports]
        wanted = self._pace.should_decide(at_s, compute_s, num=num)
        self._means.add(samples, compute_s, spread_s, restart=self._pace.eventful, num=num)
        if not wanted:
            self._tally.add(done.generation, done.steps)
            return ()
        self._tally.add(done.generation, done.quiet)
        rows = tuple(map(_computing, done.reports, self._means.take()))
        quiet = self._tally.take(done.generation)
        return self.handle(at_s, replace(done, reports=rows, quiet=quiet))

    def close(self) -> None:
        """End the journal."""
        if self._engine.journal is not None:
            self._engine.journal.close()
        self._engine.journal = None


class Restored(NamedTuple):
    """A run as its journal has it."""

    brain: Brain
    clock_s: float  # where the run's own clock stands
    used: set[WorkerId]  # every id that was ever in a roster
    before: tuple[WorkerId, ...]  # the roster before the newest


def settings_of(ready: Ready, sets: Sequence[str]) -> Settings:
    """Defaults, under the script's own settings, under the command line's."""
    settings = build(Settings, override(ready.settings, sets))
    own = {"size": ready.batch, "per_worker": ready.per_worker, "limit": ready.limit}
    for name, value in own.items():
        if getattr(settings.batch, name) != value:
            raise ConfigError(f"batch.{name}", f"is the script's own, {value}: set it there")
    return settings


def _check_room(batch: BatchSettings, num_workers: int, cap: int | None) -> None:
    """Raise if even the largest batch has too few samples for so many workers.

    Such a run would pause for ever: workers that join make it larger still.
    """
    largest, each = batch.size or batch.limit, min(batch.min_share, cap or batch.min_share)
    if each * num_workers > largest:
        raise BatchBoundsError(largest, each * num_workers, largest, num_workers)


def _computing(report: StepReport, usual: tuple[float, float]) -> StepReport:
    return replace(report, compute_s=usual[0], spread_s=usual[1])
