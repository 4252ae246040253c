"""What workers tell each other along with a step's gradients: each its report, the leader the plan.

`reduce/pulse.py` defines how it is encoded.
"""

from __future__ import annotations

from typing import Protocol

import torch

from evenstep.train.measure.host_load import HostLoad
from evenstep.train.plan.planner import NoPlanner, Planner, StepResult
from evenstep.train.reduce import pulse
from evenstep.train.reduce.loss_scale import check_scales
from evenstep.train.reduce.pulse import Report
from evenstep.train.replica import Replica


class Generations(Protocol):
    """The roster, as the exchange needs it."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...

    def num_pending(self) -> int:
        """On the leader: by how many generations to move on at the end of this step."""
        ...

    def move_on(self, num: int) -> None:
        """All workers move on by so many generations at the end of this step."""
        ...


class Exchange:
    """Fills in this worker's part of the pulse, and reads the sum of all parts."""

    def __init__(self, replica: Replica, roster: Generations, host_load: HostLoad) -> None:
        self._replica, self._roster, self._host_load = replica, roster, host_load
        self.planner: Planner = NoPlanner()
        replica.step.on_committed.append(self._report)

    def fill(self, used: list[bool]) -> torch.Tensor:
        """This worker's part, with the parameters that it has a gradient for."""
        replica, roster = self._replica, self._roster
        step, model = replica.step, replica.model
        step.ready()
        batch = step.batch
        report = Report(
            samples=batch.samples,
            compute_s=model.meter.compute_s(batch.samples),
            wait_s=model.meter.wait_s,
            free_cpu=self._host_load.free_cpu,
            free_memory=self._host_load.free_memory,
            weight=batch.weight,
            grad_squared_norm=model.reducer.grad_squared_norm(own=True),
            loss_scale=replica.loss_scale.current(),
        )
        from_step = step.number + 1 + replica.loader.prefetched  # not prefetched by anyone yet
        plan, num_pending = self.planner.next(from_step), roster.num_pending()
        return pulse.encode(step.number, roster.world, roster.rank, report, plan, used, num_pending)

    def read(self, summed: torch.Tensor) -> tuple[float, list[bool]]:
        """What makes the workers' weights add up to one, and the parameters that anyone used."""
        replica, roster = self._replica, self._roster
        step = replica.step
        reports, plan, num_pending, used = pulse.decode(summed, step.number, roster.world)
        check_scales(reports)
        if plan is not None:
            replica.plans.extend(plan)
        if num_pending:
            roster.move_on(num_pending)
        step.reduced(reports)
        total = sum(r.weight for r in reports)
        return step.batch.total / total if total > 0 else 0.0, used

    def _report(self) -> None:
        step, model, loader = self._replica.step, self._replica.model, self._replica.loader
        result = StepResult(
            step=step.batch.step,
            seconds=step.seconds,
            reports=step.reports,
            grad_squared_norm=model.reducer.grad_squared_norm(),
            position=loader.position + step.batch.total,
        )
        self.planner.report(result)
