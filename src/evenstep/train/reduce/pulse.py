"""The pulse: a few numbers summed along with the gradients, so that all ranks learn the same.

Every rank fills in its own report and leaves the others' zero, and flags the parameters it has a
gradient for; the leader fills in the newest plan, and the generation that comes after this step if
there is one. After the sum everyone holds all of it, with no further round trip. All counts are
below 2**24: single precision holds them exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from evenstep.train.report import RankPlan, Report

MAX_BATCH = 2**24
REPORT = 8  # numbers in a report


def size(world: int) -> int:
    """Numbers in a pulse, the flags not counted."""
    return world * REPORT + 3 + world


def encode(
    step: int,
    world: int,
    rank: int,
    report: Report,
    plan: RankPlan | None,
    used: Sequence[bool],
    switch: int = 0,
) -> torch.Tensor:
    """This rank's part of the pulse of a step. `switch`: generations to go on by, after it."""
    begin, flags = world * REPORT, size(world)
    pulse = np.zeros(flags + len(used))
    pulse[rank * REPORT : (rank + 1) * REPORT] = (
        report.samples,
        report.compute_s,
        report.wait_s,
        report.free_cpu,
        report.free_memory,
        report.weight,
        report.grad_squared_norm,
        report.loss_scale,
    )
    if plan is not None:
        ahead = plan.from_step - step  # never at the step itself
        pulse[begin : flags - 1] = (ahead, plan.lr_factor, *plan.shares)
    pulse[flags - 1] = switch
    pulse[flags:] = used
    return torch.from_numpy(pulse)


def decode(
    pulse: torch.Tensor, step: int, world: int
) -> tuple[list[Report], RankPlan | None, int, list[bool]]:
    """All reports by rank, the leader's plan and switch, if any, the parameters anyone used."""
    values = pulse.tolist()
    reports = []
    for rank in range(world):
        samples, *rest = values[rank * REPORT : (rank + 1) * REPORT]
        compute_s, wait_s, free_cpu, free_memory, weight, squared_norm, loss_scale = rest
        reports.append(
            Report(
                samples=int(samples),
                compute_s=compute_s,
                wait_s=wait_s,
                free_cpu=free_cpu,
                free_memory=free_memory,
                weight=weight,
                grad_squared_norm=squared_norm,
                loss_scale=loss_scale,
            )
        )
    begin, flags = world * REPORT, size(world)
    ahead, lr_factor, *shares, switch = values[begin:flags]
    plan = None
    if ahead:
        whole = tuple(map(int, shares))
        plan = RankPlan(from_step=step + int(ahead), shares=whole, lr_factor=lr_factor)
    return reports, plan, int(switch), [v > 0 for v in values[flags:]]
