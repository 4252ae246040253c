"""The engine of a run, as membership uses it: paced, journalled, restored from its journal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from evenstep.config import Settings
from evenstep.coordinate.events import TookOver
from evenstep.decide.cluster import Cluster
from evenstep.engine import Engine
from evenstep.errors import EvenstepError, JournalError, PlanError
from evenstep.journal import Journal, Record, Records, read
from evenstep.observe.tally import Tally
from evenstep.pace import MeanTimes, Pacer, SkippedSteps
from evenstep.types import AnyAction, AnyEvent, Joined, Left, Lost, Plan, StepDone, WorkerId

log = logging.getLogger("evenstep")


class Damage(NamedTuple):
    """What was lost with a damaged journal."""

    problem: str
    num_lines: int  # lines that are given up
    num_bytes: int  # bytes that are given up
    aside: Path  # the damaged file, kept


class Watcher(Protocol):
    """Follows a run for people."""

    def add(self, record: Record) -> None:
        """One more record, as it is in the journal."""


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
        self.tally = Tally()
        self._watchers: list[Watcher] = [self.tally]
        self._means, self._skipped = MeanTimes(), SkippedSteps()
        self._idle_s = 0.0  # of steps without a decision
        self._undecided: StepDone | None = None  # the last step, if it was skipped

    def begin(self, settings: Settings, facts: dict[str, Any]) -> None:
        """Begin a new run."""
        engine = Engine(settings)
        engine.journal = self._open_journal(engine.cluster.settings, {"facts": facts})
        engine.is_watched = True
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
                    self._show(record)
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
        engine.journal, engine.is_watched = journal, True
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
        if isinstance(event, StepDone):
            return self._balanced(lambda: self._paced(now_s, event))
        if isinstance(event, Left) and set(self.cluster.roster) <= set(event.workers):
            self._balanced(lambda: self._put_rest(now_s))
        return self._put(now_s, event)

    def _balanced(self, decide: Callable[[], tuple[AnyAction, ...]]) -> tuple[AnyAction, ...]:
        if not self._balances:
            return ()
        try:
            return decide()
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
        if self._begun.newest is not None:
            self._show(self._begun.newest)
        moved = any(isinstance(action, Plan) for action in actions)
        self._pace.decided(self._timer() - began_s, moved=moved)
        return actions

    def watch(self, watcher: Watcher) -> None:
        """From now on, show it every record; before `restore`, those of the run so far too."""
        self._watchers.append(watcher)

    def _show(self, record: Record) -> None:
        """Update what people see of the run. A bug there must not stop anything."""
        for watcher in tuple(self._watchers):
            try:
                watcher.add(record)
            except Exception:
                self._watchers.remove(watcher)
                name = type(watcher).__name__
                log.exception("%s of the run stays as it is: it could not be kept up", name)

    def _put_rest(self, now_s: float) -> tuple[AnyAction, ...]:
        """Training is over: no other step will carry the totals of those that were skipped."""
        done = self._undecided
        if done is None or done.generation != self.cluster.generation:
            return ()
        self._undecided = None
        return self._put(now_s, self._with_skipped(done))

    def _paced(self, now_s: float, done: StepDone) -> tuple[AnyAction, ...]:
        if (skipped := self._undecided) is not None:
            self._skipped.add(skipped.generation, skipped.steps, skipped.earlier)
        num, samples = done.steps.num, [r.samples for r in done.reports]
        compute_s = [r.compute_s for r in done.reports]
        spread_s = [r.spread_s for r in done.reports]
        wanted = self._pace.should_decide(now_s, compute_s, num=num)
        self._means.add(samples, compute_s, spread_s, restart=self._pace.eventful, num=num)
        self._idle_s += done.idle_s
        self._undecided = None if wanted else done
        return self._put(now_s, self._with_skipped(done)) if wanted else ()

    def _with_skipped(self, done: StepDone) -> StepDone:
        """A step with the means and totals of those skipped before it."""
        self._skipped.add(done.generation, done.quiet, done.earlier)
        idle_s, self._idle_s = self._idle_s, 0.0
        rows = tuple(
            replace(report, compute_s=mean_s, spread_s=spread_s)
            for report, (mean_s, spread_s) in zip(done.reports, self._means.take(), strict=True)
        )
        quiet, earlier = self._skipped.take(done.generation)
        return replace(done, reports=rows, quiet=quiet, earlier=earlier, idle_s=idle_s)

    def sync(self) -> None:
        """Flush what must not be forgotten to disk, before decisions are announced."""
        if self._journal is not None:
            self._journal.sync()

    def flush(self) -> None:
        """Write records that wait for a disk that was full, if there is room by now."""
        if self._journal is not None:
            self._journal.flush()

    @property
    def problem(self) -> str:
        """Why journal records are still unwritten; empty if none are."""
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
