"""The pulse: a few numbers all-reduced along with the gradients, so that all ranks agree.

Every rank fills in its own report, leaves the others' zero, and flags the parameters it has a
gradient for; the leader adds the newest plan, and how many generations to move on by after this
step. The sum gives all of it to every rank without another round trip. All counts are at most
MAX_BATCH, which single precision represents exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import astuple

from evenstep.errors import EvenstepError
from evenstep.train.comm.group import WorkerLostError
from evenstep.train.measure.host_load import HostLoad
from evenstep.train.measure.meter import Meter
from evenstep.train.optimizer_settings import OptimizerSettings, check_settings
from evenstep.train.plan.plans import Plans, RankPlan
from evenstep.train.ports import NoPlanner, Planner, Roster
from evenstep.train.reduce.loss_scale import LossScale, check_scales
from evenstep.train.step import MAX_BATCH, Report, Step
from evenstep.train.updates import Updates

log = logging.getLogger("evenstep")

REPORT_SIZE = len(Report.__struct_fields__)


class Exchange:
    """Fills in this worker's part of the pulse, and reads the sum of all parts."""

    def __init__(
        self,
        step: Step,
        plans: Plans,
        roster: Roster,
        loss_scale: LossScale,
        settings: OptimizerSettings,
        updates: Updates,
        host_load: HostLoad,
    ) -> None:
        self._step, self._plans, self._roster = step, plans, roster
        self._loss_scale, self._settings, self._updates = loss_scale, settings, updates
        self._host_load = host_load
        self.meter: Meter
        self.planner: Planner = NoPlanner()
        self._told_faulty: set[int] = set()  # ranks whose gradients were not finite
        self.prefetched = 0  # batches that loader processes hold: cut by plans already announced

    def fill(self, used: list[bool], own_squared_norm: float, is_finite: bool) -> torch.Tensor:
        """This worker's part, with a flag for each parameter that it has a gradient for."""
        step, roster = self._step, self._roster
        if not step.has_batch:
            raise EvenstepError(
                "backward() was called outside of a loop over session.loader(...), on samples that "
                "no worker was assigned. Take training batches from session.loader only."
            )
        if step.reports and step.reduced_in != roster.generation and roster.hands_over_state:
            raise EvenstepError(
                f"backward() was called again in step {step.number}, whose gradients generation "
                f"{step.reduced_in} has reduced: a worker was lost since, in a sum, and the batch "
                "would lack its samples. Do all backward passes of a batch before the "
                "first session.sum that follows one of them. Resume with evenstep run --resume."
            )
        step.is_between = False
        updates = self._updates.last
        report = Report(
            samples=step.batch.samples,
            compute_s=self.meter.ready(step.batch.samples),
            wait_s=self.meter.wait_s,
            free_cpu=self._host_load.free_cpu,
            free_memory=self._host_load.free_memory,
            weight=step.batch.weight,
            grad_squared_norm=own_squared_norm,
            loss_scale=self._loss_scale.current(roster.generation),
            num_updates=updates.optimizers,
            num_scheduled=updates.schedulers,
            registered=updates.registered,
            data_digest=float(step.batch.digest),
            settings_digest=self._settings.digest(),
            items=step.own_counts[0],
            loss=step.own_counts[1],
            nonfinite=float(not is_finite),
            epoch=float(step.batch.epoch % MAX_BATCH),
        )
        plan = self.planner.next(step.number + 1 + self.prefetched)
        num_pending = roster.num_pending
        return _encode(step.number, roster.world, roster.rank, report, plan, used, num_pending)

    def read(self, summed: torch.Tensor) -> tuple[float, list[bool]]:
        """The factor that makes the workers' weights add up to one, and the parameters in use."""
        self.meter.reduced()
        step, roster = self._step, self._roster
        reports, plan, num_pending, used = _decode(summed, step.number, roster.world)
        if any(report.is_faulty for report in reports):
            self._judge_faulty(reports)
        if any(report.loss_scale != reports[0].loss_scale for report in reports):
            check_scales(reports)
        if len({(r.num_updates, r.num_scheduled, r.registered) for r in reports}) > 1:
            self._updates.check(reports)
        if any(report.epoch != reports[0].epoch for report in reports):
            _refuse_epochs(step.number, reports)
        if any(report.data_digest != reports[0].data_digest for report in reports):
            _refuse_data(step.number, reports)
        if any(report.settings_digest != reports[0].settings_digest for report in reports):
            check_settings(step.number, reports)
        if roster.rank == 0 and all(report.num_updates < 0 for report in reports):
            self._settings.warn_if_begun_anew()
        if plan is not None:
            self._plans.extend(plan)
        if num_pending:
            roster.move_on(num_pending)
        step.reduced(reports, roster.current)
        total = sum(r.weight for r in reports)
        return step.batch.total / total if total > 0 else 0.0, used

    def _judge_faulty(self, reports: Sequence[Report]) -> None:
        """Gradients of some workers are not finite. The step counts, as it would in one process.

        But not if they are a worker's first ones, and those of workers before it are finite: the
        others repeat the step without it, with the same samples. If these are the cause, another
        worker's gradients are not finite then.
        """
        faulty = {rank for rank, report in enumerate(reports) if report.is_faulty}
        if self._roster.current is None:  # else the coordinator says so
            if self._roster.rank == 0 and (told := faulty - self._told_faulty):
                ranks, step = ", ".join(map(str, sorted(told))), self._step.number
                log.warning("the gradients of rank %s are not finite (step %d)", ranks, step)
            self._told_faulty |= faulty
            return
        new = {rank for rank, report in enumerate(reports) if report.num_updates < 0}
        proven = [r for r in reports if r.num_updates >= 0 and r.weight > 0]
        if not (proven and faulty <= new):
            return
        number = self._step.number
        if self._roster.rank in faulty:
            raise EvenstepError(
                f"the gradients of this worker are not finite in step {number}, its first one, and "
                "those of the other workers are. Check this host's device, memory and data."
            )
        ranks = ", ".join(map(str, sorted(faulty)))
        raise WorkerLostError(f"gradients of rank {ranks}, which has just joined, are not finite")


def _refuse_epochs(step: int, reports: Sequence[Report]) -> None:
    """Refuse workers in different epochs: they would use samples twice, or never."""
    epochs = ", ".join(f"{int(report.epoch)} on rank {rank}" for rank, report in enumerate(reports))
    raise EvenstepError(
        f"step {step} is of epoch {epochs}: a loop over session.loader(...) was left after a "
        "different number of steps. Leave it at the same step on every worker: decide by what all "
        "of them know, such as session.step or session.sum(loss), not by a counter or a loss of "
        "one worker."
    )


def _refuse_data(step: int, reports: Sequence[Report]) -> None:
    """Refuse workers whose data is in different orders: they would use samples twice, or never."""
    digests = [report.data_digest for report in reports]
    usual = max(set(digests), key=digests.count)
    others = ", ".join(str(rank) for rank, digest in enumerate(digests) if digest != usual)
    raise EvenstepError(
        f"in step {step} the sampler or stream of rank {others} gives other samples than those of "
        "the other ranks. It must depend on the epoch only: not on the rank or the worker, the "
        "clock, or what it gave before; random numbers are seeded for it. A stream must not be "
        "split by rank: evenstep shares it out."
    )


def pulse_size(world: int) -> int:
    """Numbers in a pulse without its flags."""
    return world * REPORT_SIZE + 3 + world


def _encode(
    step: int,
    world: int,
    rank: int,
    report: Report,
    plan: RankPlan | None,
    used: Sequence[bool],
    num_generations: int,
) -> torch.Tensor:
    """This rank's part of a step's pulse. `num_generations`: to move on by after the step."""
    begin, flags = world * REPORT_SIZE, pulse_size(world)
    pulse = np.zeros(flags + len(used))
    pulse[rank * REPORT_SIZE : (rank + 1) * REPORT_SIZE] = astuple(report)
    if plan is not None:
        ahead = plan.from_step - step  # at least 1, since 0 means no plan
        pulse[begin : flags - 1] = (ahead, plan.lr_factor, *plan.shares)
    pulse[flags - 1] = num_generations
    pulse[flags:] = used
    return torch.from_numpy(pulse)


def _decode(
    pulse: torch.Tensor, step: int, world: int
) -> tuple[list[Report], RankPlan | None, int, list[bool]]:
    """Reports by rank, the leader's plan, generations to move on by, and flags of parameters."""
    values = pulse.tolist()
    reports = []
    for rank in range(world):
        samples, *rest = values[rank * REPORT_SIZE : (rank + 1) * REPORT_SIZE]
        fields = zip(Report.__struct_fields__, (int(samples), *rest), strict=True)
        reports.append(Report(**dict(fields)))
    begin, flags = world * REPORT_SIZE, pulse_size(world)
    ahead, lr_factor, *shares, num_generations = values[begin:flags]
    plan = None
    if ahead:
        plan = RankPlan(
            from_step=step + int(ahead), shares=tuple(map(int, shares)), lr_factor=lr_factor
        )
    return reports, plan, int(num_generations), [v > 0 for v in values[flags:]]
