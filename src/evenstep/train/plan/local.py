"""The brain in a thread of the leader: reports go in, the newest plan comes out, nobody waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from evenstep.engine import Engine
from evenstep.pace import MeanTimes, Pacer
from evenstep.train.measure.meter import busy_s
from evenstep.train.reduce.pulse import RankPlan, Report
from evenstep.types import Joined, Pause, Plan, StepDone, Worker


class Agent:
    """Runs an engine beside training. Its answer is picked up whenever it is there."""

    def __init__(self, engine: Engine, workers: Sequence[Worker]) -> None:
        self._engine = engine
        self._ids = [w.id for w in workers]
        self._pace, self._means = Pacer(), MeanTimes()
        self._inbox: queue.SimpleQueue[tuple[float, StepDone] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._newest: Plan | None = None
        self.failure: BaseException | None = None
        self.paused = ""  # why there is no plan
        self._handle(0.0, Joined(workers=tuple(workers)))
        self._thread = threading.Thread(target=self._run, name="evenstep-agent", daemon=True)
        self._thread.start()

    def report(
        self,
        at_s: float,
        step: int,
        seconds: float,
        reports: Sequence[Report],
        grad_squared_norm: float = 0.0,
    ) -> None:
        """Hand over what a step measured, by rank, if it is worth a decision."""
        compute_s = [r.compute_s for r in reports]
        with self._lock:
            wanted, eventful = self._pace.should_decide(at_s, compute_s), self._pace.eventful
        self._means.add([r.samples for r in reports], compute_s, restart=eventful)
        if not wanted:
            return
        rows = map(Report.of, reports, self._ids, *zip(*self._means.take(), strict=True))
        generation = self._engine.cluster.generation
        done = StepDone(
            step=step,
            generation=generation,
            seconds=seconds,
            reports=tuple(rows),
            grad_squared_norm=grad_squared_norm,
        )
        self._inbox.put((at_s, done))

    def take(self, from_step: int) -> RankPlan | None:
        """The newest plan, once, to be valid from a step on."""
        with self._lock:
            plan, self._newest = self._newest, None
        if plan is None:
            return None
        shares = tuple(plan.shares[w] for w in self._ids)
        return RankPlan(from_step=from_step, shares=shares, lr_factor=plan.lr_factor)

    def close(self) -> None:
        """Decide on what has been reported, then end."""
        self._inbox.put(None)
        self._thread.join()
        if self._engine.journal is not None:
            self._engine.journal.close()

    def _run(self) -> None:
        try:
            while (item := self._inbox.get()) is not None:
                self._handle(*item)
        except BaseException as e:  # training goes on with the last plan; the session tells of it
            self.failure = e

    def _handle(self, at_s: float, event: Joined | StepDone) -> None:
        begun_s = busy_s()
        actions = self._engine.handle(at_s, event)
        took_s = busy_s() - begun_s
        plans = [action for action in actions if isinstance(action, Plan)]
        with self._lock:
            self._pace.decided(took_s, moved=bool(plans))
            if plans:
                self._newest = plans[-1]
        for action in actions:
            if isinstance(action, Pause):
                self.paused = action.reason
