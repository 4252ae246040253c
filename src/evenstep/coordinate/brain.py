"""The engine of a run as membership asks it: paced, journalled, restored from its journal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import astuple, replace

from evenstep.config import Settings
from evenstep.coordinate.events import TookOver
from evenstep.decide.cluster import Cluster
from evenstep.engine import Engine
from evenstep.errors import EvenstepError, JournalError, PlanError
from evenstep.journal import Journal, Records, read
from evenstep.pace import MeanTimes, Pacer, SkippedSteps
from evenstep.types import AnyAction, AnyEvent, Joined, Lost, Plan, StepDone, WorkerId

log = logging.getLogger("evenstep")


class Damage(NamedTuple):
    """What a damaged journal has lost."""

    problem: str
    num_lines: int  # that are given up
    num_bytes: int  # likewise
    aside: Path  # the damaged file, kept


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

    def restore(self, path: Path) -> tuple[float, TookOver, Damage | None]:
        """Go on with the run of a journal, up to its first damage.

        Returns where its clock stands, what it knows, and the damage.
        """
        journal = Journal.resume(path)
        damage: Damage | None = None
        try:
            header, records = read(path)
            engine, clock_s = Engine(header.settings), 0.0
            rostered: set[WorkerId] = set()
            previous: tuple[WorkerId, ...] = ()
            lost: tuple[WorkerId, ...] = ()
            try:
                for record in records:
                    before = engine.cluster
                    engine.handle(record.at_s, record.event)
                    self.num_decided += 1
                    clock_s = max(clock_s, record.at_s)
                    if engine.cluster.generation > before.generation:
                        previous = before.roster
                    if engine.cluster.roster:
                        lost = ()
                    elif isinstance(record.event, Lost):
                        lost = before.roster
                    if isinstance(record.event, Joined):
                        rostered.update(w.id for w in record.event.workers)
            except (EvenstepError, OSError) as e:
                damage = _cut(journal, records, e)
        except BaseException:
            journal.close()
            raise
        engine.journal = journal
        self._engine = engine
        took_over = TookOver(
            facts=header.about.get("facts", {}),
            rostered=tuple(sorted(rostered)),
            previous_roster=previous,
            lost=lost,
        )
        return clock_s, took_over, damage

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
        began_s = self._timer()
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

    def sync(self) -> None:
        """Before anyone is told of decisions: what must not be forgotten is on the disk."""
        if self._journal is not None:
            self._journal.sync()

    def flush(self) -> None:
        """Write records that wait for a disk that was full, if there is room by now."""
        if self._journal is not None:
            self._journal.flush()

    @property
    def problem(self) -> str:
        """Why records of the journal wait; empty if none do."""
        return self._journal.problem if self._journal is not None else ""

    def close(self) -> None:
        """Close the journal."""
        if self._engine is not None and self._journal is not None:
            journal, self._engine.journal = self._journal, None
            try:
                journal.close()
            except JournalError as e:
                log.error("%s; a resumed run does not know of them", e)

    @property
    def _journal(self) -> Journal | None:
        return self._engine.journal if self._engine is not None else None


def _cut(journal: Journal, records: Records, error: Exception) -> Damage:
    """Keep the records before the damage in the journal, and the damaged file beside it."""
    path, num_lines = records.path, records.num_lines
    if not isinstance(error, JournalError):
        error = JournalError(str(path), num_lines + 1, f"cannot be used: {error}")
    with path.open("rb") as file:
        file.seek(records.num_bytes)
        num_given_up = sum(1 for _ in file)
    num_bytes = path.stat().st_size - records.num_bytes
    return Damage(str(error), num_given_up, num_bytes, journal.cut(records.num_bytes))
