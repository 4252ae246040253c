"""Plans from the coordinator: the leader reports its steps and passes the answers on.

A message per step costs sender and receiver about 2 ms of CPU where they share cores, a fifth of a
short step. So steps that show something new are reported at once, and uneventful ones in batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from evenstep.messages import Generation, NewPlan, Stepped
from evenstep.pace import Sampling
from evenstep.train.plan.plans import RankPlan
from evenstep.train.step import Report, Step
from evenstep.types import Steps

MESSAGE_S = 0.002  # measured CPU cost of one message, sender and receiver together


class Coordination(Protocol):
    """The connection to the coordinator."""

    def take_plan(self, generation: int) -> NewPlan | None: ...
    def send(self, message: Stepped) -> None: ...


class Place(Protocol):
    """This worker's place in the run."""

    @property
    def leads(self) -> bool: ...
    @property
    def generation(self) -> int: ...


class RemotePlanner:
    """Reports steps, within a time budget. Every step is counted exactly once."""

    def __init__(
        self, place: Place, control: Coordination, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._place, self._control, self._clock = place, control, clock
        self._pace = Sampling()
        self._reported = 0  # the generation of the last step
        self._faulty: set[str] = set()  # workers whose gradients were not finite since then

    def next(self, from_step: int) -> RankPlan | None:
        """The coordinator's newest plan, once, on the leader."""
        if not self._place.leads:
            return None
        plan = self._control.take_plan(self._place.generation)
        if plan is None:
            return None
        self._watch_closely()
        return RankPlan(from_step=from_step, shares=plan.shares, lr_factor=plan.lr_factor)

    def report(self, step: Step) -> None:
        """Report a step, on the leader: now, or together with the next one reported."""
        by = step.reduced_by
        if by is None or not self._place.leads:
            return
        if by.number != self._reported:
            self._reported = by.number
            self._watch_closely()
        present = zip(by.roster, step.reports, strict=False)
        self._faulty |= {worker for worker, report in present if report.is_faulty}
        sampled = self._pace.sample(
            self._clock(), step.reports, generation=by.number, seconds=step.seconds
        )
        if sampled is not None:
            self._pace.decided(MESSAGE_S, moved=False)
            self._send(step, by, *sampled)

    def close(self, step: Step) -> None:
        """Report the last step and those before it, unless that was done."""
        by = step.reduced_by
        if by is None or not self._place.leads or not step.is_last_committed:
            return
        if (rest := self._pace.rest()) is not None:
            self._send(step, by, *rest)

    def _send(
        self,
        step: Step,
        by: Generation,
        means: list[tuple[float, float]],
        quiet: Steps,
        earlier: Steps,
    ) -> None:
        reports = tuple(
            map(Report.to_step_report, step.reports, by.roster, *zip(*means, strict=True))
        )
        self._control.send(
            Stepped(
                generation=by.number,
                step=step.batch.step,
                seconds=step.seconds,
                reports=reports,
                grad_squared_norm=step.grad_squared_norm,
                quiet=quiet,
                earlier=earlier,
                position=step.batch.position + step.batch.total,
                idle_s=step.idle_s,
                nonfinite=tuple(sorted(self._faulty.intersection(by.roster))),
            )
        )
        step.idle_s = 0.0
        self._faulty.clear()

    def _watch_closely(self) -> None:
        """The roster or the shares changed: report each of the next few steps."""
        self._pace.decided(0.0, moved=True)
