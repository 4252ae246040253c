"""Plans for a fixed roster: the engine runs in a background thread of the leader."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from evenstep.engine import Engine
from evenstep.errors import JournalError
from evenstep.observe.feed import SinkFeed
from evenstep.pace import Sampling
from evenstep.train.measure.host_load import thread_busy_s
from evenstep.train.plan.figures import LocalFigures
from evenstep.train.plan.plans import RankPlan
from evenstep.train.step import Report, Step
from evenstep.types import Joined, Pause, Plan, StepDone, Steps, Worker

log = logging.getLogger("evenstep")


class LocalPlanner:
    """Runs an engine beside training, which picks up each plan once it is made."""

    def __init__(
        self,
        engine: Engine,
        workers: Sequence[Worker],
        clock: Callable[[], float] = time.monotonic,
        figures: LocalFigures | None = None,
    ) -> None:
        self._figures = figures or LocalFigures(SinkFeed())
        self._figures.follow(engine)
        self._engine, self._clock, self._began_s = engine, clock, clock()
        self._ids = [w.id for w in workers]
        self._pace = Sampling()
        self._inbox: queue.SimpleQueue[tuple[float, StepDone] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._newest: Plan | None = None
        self.failure: BaseException | None = None  # it plans no more; not logged yet
        self.paused = ""  # why there is no plan
        self._handle(0.0, Joined(workers=tuple(workers)))
        self._thread = threading.Thread(target=self._run, name="evenstep-planner", daemon=True)
        self._thread.start()

    def next(self, from_step: int) -> RankPlan | None:
        """The newest plan, once, valid from a step on."""
        with self._lock:
            plan, self._newest = self._newest, None
        if plan is None:
            return None
        shares = tuple(plan.shares[w] for w in self._ids)
        return RankPlan(from_step=from_step, shares=shares, lr_factor=plan.lr_factor)

    def report(self, step: Step) -> None:
        """Pass a step on to the engine, if it is worth a decision."""
        if self.failure is not None:
            log.warning("the balancer stopped; shares stay as they are: %s", self.failure)
            self.failure = None
        at_s = self._clock() - self._began_s
        with self._lock:
            sampled = self._pace.sample(at_s, step.reports, seconds=step.seconds)
        if sampled is not None:
            self._put(at_s, step, *sampled)

    def _put(
        self,
        at_s: float,
        step: Step,
        means: list[tuple[float, float]],
        quiet: Steps,
        earlier: Steps,
    ) -> None:
        done = StepDone(
            step=step.batch.step,
            generation=self._engine.cluster.generation,
            seconds=step.seconds,
            reports=tuple(
                map(Report.to_step_report, step.reports, self._ids, *zip(*means, strict=True))
            ),
            grad_squared_norm=step.grad_squared_norm,
            quiet=quiet,
            earlier=earlier,
            position=step.batch.position + step.batch.total,
        )
        self._inbox.put((at_s, done))

    def close(self, step: Step) -> None:
        """Decide on everything reported so far, and on the last step, then stop."""
        with self._lock:
            rest = self._pace.rest() if step.is_last_committed else None
        if rest is not None:
            self._put(self._clock() - self._began_s, step, *rest)
        self._inbox.put(None)
        self._thread.join()
        self._figures.offer_last()
        if self._engine.journal is not None:
            try:
                self._engine.journal.close()
            except JournalError as e:  # the disk is full: no reason to fail the script
                log.warning("%s", e)

    def _run(self) -> None:
        try:
            while (item := self._inbox.get()) is not None:
                self._handle(*item)
        except BaseException as e:  # training continues on the last plan; `report` logs it
            self.failure = e

    def _handle(self, at_s: float, event: Joined | StepDone) -> None:
        began_s = thread_busy_s()
        actions = self._engine.handle(at_s, event)
        took_s = thread_busy_s() - began_s
        plans = [action for action in actions if isinstance(action, Plan)]
        with self._lock:
            self._pace.decided(took_s, moved=bool(plans))
            if plans:
                self._newest = plans[-1]
        for action in actions:
            if isinstance(action, Pause):
                self.paused = action.reason
        self._figures.add(self._engine)
