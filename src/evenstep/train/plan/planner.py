"""What plans the shares, as the training process sees it: a local engine, or the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from evenstep.train.reduce.pulse import RankPlan, Report


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """A committed step as its planner is told."""

    step: int
    seconds: float
    reports: Sequence[Report]  # by rank
    grad_squared_norm: float  # of the reduced gradient; 0: not measured
    position: int  # samples of the job that the run is through with


class Planner(Protocol):
    """Turns measured steps into plans. Never blocks training."""

    def next(self, from_step: int) -> RankPlan | None:
        """The newest plan, once, valid from a step on; None on every rank but the leader."""

    def report(self, result: StepResult) -> None:
        """Take note of a committed step."""

    def close(self) -> None:
        """Stop planning."""


class NoPlanner:
    """For ranks that do not lead: they learn of plans in the pulse."""

    def next(self, from_step: int) -> RankPlan | None:
        """None: the leader announces plans."""
        return None

    def report(self, result: StepResult) -> None:
        """Nothing to do: the leader reports for all ranks."""

    def close(self) -> None:
        """Nothing to stop."""
