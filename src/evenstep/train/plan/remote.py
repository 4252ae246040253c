"""Plans from the coordinator: the leader reports its steps and passes the answers on.

A message per step costs sender and receiver about 2 ms of CPU where they share cores, a fifth of a
short step. So steps that show something new are reported at once, and uneventful ones in batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from evenstep.messages import Generation, NewPlan, Stepped
from evenstep.pace import Means, Pace, Tally
from evenstep.train.plan.planner import StepResult
from evenstep.train.reduce.pulse import RankPlan, Report
from evenstep.types import Steps

MESSAGE_S = 0.002  # measured CPU cost of one message, sender and receiver together


class Coordination(Protocol):
    """What the planner needs of the connection to the coordinator."""

    @property
    def leads(self) -> bool:
        """Whether this worker is the leader of its generation."""
        ...

    @property
    def current(self) -> Generation:
        """The generation that this worker is in."""
        ...

    def take_plan(self) -> NewPlan | None:
        """The newest plan for this generation, once."""
        ...

    def send(self, message: Stepped) -> None:
        """Queue a message to the coordinator."""
        ...


class RemotePlanner:
    """Reports steps within a bounded part of the time. Every step is counted exactly once."""

    def __init__(
        self, coordination: Coordination, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._coordination, self._clock = coordination, clock
        self._pace, self._means, self._tally = Pace(), Means(), Tally()
        self._reduced_by: Generation | None = None

    def watch_closely(self) -> None:
        """The roster or the shares changed: report each of the next few steps."""
        self._pace.decided(0.0, moved=True)

    def reduced(self) -> None:
        """Remember which generation reduced the step: a sum before its end may change it."""
        self._reduced_by = self._coordination.current

    def next(self, from_step: int) -> RankPlan | None:
        """The coordinator's newest plan, once, on the leader."""
        plan = self._coordination.take_plan() if self._coordination.leads else None
        if plan is None:
            return None
        self.watch_closely()
        return RankPlan(from_step=from_step, shares=plan.shares, lr_factor=plan.lr_factor)

    def report(self, result: StepResult) -> None:
        """Report a step, on the leader: now, or together with the next one reported."""
        by = self._reduced_by
        if by is None or not self._coordination.leads:
            return
        compute_s = [r.compute_s for r in result.reports]
        samples = [r.samples for r in result.reports]
        wanted = self._pace.wants(self._clock(), compute_s)
        self._means.add(samples, compute_s, anew=self._pace.lively)
        if not wanted:
            self._tally.add(by.number, Steps(num=1, seconds=result.seconds, samples=sum(samples)))
            return
        means = zip(*self._means.take(), strict=True)
        rows = map(Report.to_step_report, result.reports, by.roster, *means)
        self._coordination.send(
            Stepped(
                generation=by.number,
                step=result.step,
                seconds=result.seconds,
                reports=tuple(rows),
                grad_squared_norm=result.grad_squared_norm,
                quiet=self._tally.take(by.number),
                position=result.position,
            )
        )
        self._pace.decided(MESSAGE_S, moved=False)

    def close(self) -> None:
        """Nothing to stop: the connection belongs to the roster."""
