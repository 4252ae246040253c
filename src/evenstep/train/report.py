"""What ranks exchange in every step: each its measurements, the leader the newest plan."""

from __future__ import annotations

import msgspec

from evenstep.types import StepReport, WorkerId


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured in one step; its fields are in the order of the pulse."""

    samples: int
    compute_s: float
    wait_s: float
    free_cpu: float
    free_memory: float
    weight: float  # of this rank's mean loss: its samples, or tokens
    grad_squared_norm: float = 0.0  # of its own mean gradient; 0: not measured
    loss_scale: float = 0.0  # of its GradScalers; 1: none; 0: unknown

    def to_step_report(self, worker: WorkerId, compute_s: float, spread_s: float) -> StepReport:
        """The worker's report to the engine, with its mean compute time over similar steps."""
        return StepReport(
            worker=worker,
            samples=self.samples,
            compute_s=compute_s,
            wait_s=self.wait_s,
            free_cpu=self.free_cpu,
            free_memory=self.free_memory,
            grad_squared_norm=self.grad_squared_norm,
            spread_s=spread_s,
        )


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Shares by rank, valid from a step on, and the learning-rate factor that goes with them."""

    from_step: int
    shares: tuple[int, ...]
    lr_factor: float = 1.0
