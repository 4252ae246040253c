"""What plans the shares, as the training process sees it: a local engine, or the coordinator."""

from __future__ import annotations

from typing import Protocol

from evenstep.train.report import RankPlan
from evenstep.train.step import Step


class Planner(Protocol):
    """Turns measured steps into plans. Never blocks training."""

    def next(self, from_step: int) -> RankPlan | None:
        """The newest plan, once, valid from a step on; None on every rank but the leader."""

    def report(self, step: Step) -> None:
        """Take note of a step that was just committed."""

    def close(self) -> None:
        """Stop planning."""


class NoPlanner:
    """For ranks that do not lead, which learn of plans in the pulse, and for plans made ahead."""

    def next(self, from_step: int) -> RankPlan | None:
        """None: the leader announces plans."""
        return None

    def report(self, step: Step) -> None:
        """Nothing to do: the leader reports for all ranks."""

    def close(self) -> None:
        """Nothing to stop."""
