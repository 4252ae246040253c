"""What workers tell each other along with a step's gradients: each its report, the leader the plan.

`reduce/pulse.py` defines how it is encoded.
"""

from __future__ import annotations

import torch

from evenstep.errors import EvenstepError
from evenstep.train.measure.host_load import HostLoad
from evenstep.train.measure.meter import Meter
from evenstep.train.plan.planner import NoPlanner, Planner
from evenstep.train.plan.plans import Plans
from evenstep.train.ports import Roster
from evenstep.train.reduce import pulse
from evenstep.train.reduce.loss_scale import LossScale, check_scales
from evenstep.train.report import Report
from evenstep.train.step import Step


class Exchange:
    """Fills in this worker's part of the pulse, and reads the sum of all parts."""

    def __init__(
        self, step: Step, plans: Plans, roster: Roster, loss_scale: LossScale, host_load: HostLoad
    ) -> None:
        self._step, self._plans, self._roster = step, plans, roster
        self._loss_scale, self._host_load = loss_scale, host_load
        self.meter: Meter
        self.planner: Planner = NoPlanner()
        self.prefetched = 0  # batches that loader processes hold: cut by plans already announced

    def fill(self, used: list[bool], own_squared_norm: float) -> torch.Tensor:
        """This worker's part, with a flag for each parameter that it has a gradient for."""
        step, roster = self._step, self._roster
        if not step.has_batch:
            raise EvenstepError(
                "backward() was called outside of a loop over session.loader(...), on samples that "
                "no worker was assigned. Take training batches from session.loader only."
            )
        step.is_between = False
        self.meter.ready()
        report = Report(
            samples=step.batch.samples,
            compute_s=self.meter.compute_s(step.batch.samples),
            wait_s=self.meter.wait_s,
            free_cpu=self._host_load.free_cpu,
            free_memory=self._host_load.free_memory,
            weight=step.batch.weight,
            grad_squared_norm=own_squared_norm,
            loss_scale=self._loss_scale.current(),
        )
        plan = self.planner.next(step.number + 1 + self.prefetched)
        num_pending = roster.backward_done()
        return pulse.encode(step.number, roster.world, roster.rank, report, plan, used, num_pending)

    def read(self, summed: torch.Tensor) -> tuple[float, list[bool]]:
        """What makes the workers' weights add up to one, and the parameters that anyone used."""
        self.meter.reduced()
        step, roster = self._step, self._roster
        reports, plan, num_pending, used = pulse.decode(summed, step.number, roster.world)
        if any(report.loss_scale != reports[0].loss_scale for report in reports):
            check_scales(reports)
        if plan is not None:
            self._plans.extend(plan)
        if num_pending:
            roster.move_on(num_pending)
        step.reduced(reports, roster.current)
        total = sum(r.weight for r in reports)
        return step.batch.total / total if total > 0 else 0.0, used
