"""The engine of a run as membership asks it: paced, journalled, restored from its journal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import astuple, replace

from evenstep.config import Settings
from evenstep.coordinate.events import TookOver
from evenstep.decide.cluster import Cluster
from evenstep.engine import Engine
from evenstep.errors import JournalError, PlanError
from evenstep.journal import Journal, read
from evenstep.pace import MeanTimes, Pacer, SkippedSteps
from evenstep.types import AnyAction, AnyEvent, Joined, Plan, StepDone, WorkerId

log = logging.getLogger("evenstep")


class Brain:
    """Decides for one run. An event goes to the journal before anyone acts on it.

    `timer` returns the seconds that this thread has computed for.
    """

    def __init__(
        self,
        open_journal: Callable[[Settings, dict[str, Any]], Journal | None],
        timer: Callable[[], float],
    ) -> None:
        self._open_journal, self._timer = open_journal, timer
        self._engine: Engine | None = None
        self.num_decided = 0  # events decided on; each is a record of the journal
        self._pace = Pacer()
        self._balances = True
        self._means, self._tally = MeanTimes(), SkippedSteps()

    def begin(self, settings: Settings, facts: dict[str, Any]) -> None:
        """Begin a new run."""
        engine = Engine(settings)
        engine.journal = self._open_journal(engine.cluster.settings, {"facts": facts})
        self._engine = engine

    def restore(self, path: Path) -> tuple[float, TookOver]:
        """Go on with the run of a journal: where its clock stands, and what the journal knows."""
        journal = Journal.resume(path)
        try:
            header, records = read(path)
            engine, clock_s = Engine(header.settings), 0.0
            rostered: set[WorkerId] = set()
            previous: tuple[WorkerId, ...] = ()
            for record in records:
                before = engine.cluster
                engine.handle(record.at_s, record.event)
                self.num_decided += 1
                clock_s = max(clock_s, record.at_s)
                if engine.cluster.generation > before.generation:
                    previous = before.roster
                if isinstance(record.event, Joined):
                    rostered.update(w.id for w in record.event.workers)
        except BaseException:
            journal.close()
            raise
        engine.journal = journal
        self._engine = engine
        took_over = TookOver(
            facts=header.about.get("facts", {}),
            rostered=tuple(sorted(rostered)),
            previous_roster=previous,
        )
        return clock_s, took_over

    @property
    def cluster(self) -> Cluster:
        """What it knows."""
        return self._begun.cluster

    @property
    def _begun(self) -> Engine:
        assert self._engine is not None, "the first ready worker begins the run"
        return self._engine

    def decide(self, now_s: float, event: AnyEvent) -> tuple[AnyAction, ...]:
        """Decide on an event; on a step only if it is worth the time.

        On a step, a mistake of a policy ends balancing, not training.
        """
        if not isinstance(event, StepDone):
            return self._put(now_s, event)
        if not self._balances:
            return ()
        try:
            return self._paced(now_s, event)
        except PlanError as e:
            log.error("the balancer has stopped, shares stay: %s", e)
        except Exception:
            log.exception("the balancer has stopped, shares stay")
        self._balances = False
        return ()

    def _put(self, now_s: float, event: AnyEvent) -> tuple[AnyAction, ...]:
        """If the journal cannot be written any more, the run goes on without it."""
        began_s = self._timer()
        try:
            actions = self._begun.handle(now_s, event)
        except JournalError as e:
            log.error("%s; the run goes on, but nobody can take it over", e)
            self.close()
            actions = self._begun.handle(now_s, event)
        self.num_decided += 1
        moved = any(isinstance(action, Plan) for action in actions)
        self._pace.decided(self._timer() - began_s, moved=moved)
        return actions

    def _paced(self, now_s: float, done: StepDone) -> tuple[AnyAction, ...]:
        num, samples = done.steps.num, [r.samples for r in done.reports]
        compute_s = [r.compute_s for r in done.reports]
        spread_s = [r.spread_s for r in done.reports]
        wanted = self._pace.should_decide(now_s, compute_s, num=num)
        self._means.add(samples, compute_s, spread_s, restart=self._pace.eventful, num=num)
        if not wanted:
            self._tally.add(done.generation, *astuple(done.steps))
            return ()
        self._tally.add(done.generation, *astuple(done.quiet))
        rows = tuple(
            replace(report, compute_s=mean_s, spread_s=spread_s)
            for report, (mean_s, spread_s) in zip(done.reports, self._means.take(), strict=True)
        )
        quiet = self._tally.take(done.generation)
        return self._put(now_s, replace(done, reports=rows, quiet=quiet))

    def close(self) -> None:
        """Close the journal."""
        if self._engine is not None and self._engine.journal is not None:
            self._engine.journal.close()
            self._engine.journal = None
