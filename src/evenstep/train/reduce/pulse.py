"""The pulse: a few numbers all-reduced along with the gradients, so that all ranks agree.

Every rank fills in its own report, leaves the others' zero, and flags the parameters it has a
gradient for; the leader adds the newest plan, and how many generations to move on by after this
step. The sum gives all of it to every rank without another round trip. All counts are below 2**24,
which single precision represents exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import astuple

from evenstep.train.report import RankPlan, Report

MAX_BATCH = 2**24
REPORT_SIZE = 8  # numbers in a report


def size(world: int) -> int:
    """Numbers in a pulse without its flags."""
    return world * REPORT_SIZE + 3 + world


def encode(
    step: int,
    world: int,
    rank: int,
    report: Report,
    plan: RankPlan | None,
    used: Sequence[bool],
    num_generations: int = 0,
) -> torch.Tensor:
    """This rank's part of a step's pulse. `num_generations`: to move on by after the step."""
    begin, flags = world * REPORT_SIZE, size(world)
    pulse = np.zeros(flags + len(used))
    pulse[rank * REPORT_SIZE : (rank + 1) * REPORT_SIZE] = astuple(report)
    if plan is not None:
        ahead = plan.from_step - step  # at least 1, since 0 means no plan
        pulse[begin : flags - 1] = (ahead, plan.lr_factor, *plan.shares)
    pulse[flags - 1] = num_generations
    pulse[flags:] = used
    return torch.from_numpy(pulse)


def decode(
    pulse: torch.Tensor, step: int, world: int
) -> tuple[list[Report], RankPlan | None, int, list[bool]]:
    """Reports by rank, the leader's plan, generations to move on by, and flags of parameters."""
    values = pulse.tolist()
    reports = []
    for rank in range(world):
        samples, *rest = values[rank * REPORT_SIZE : (rank + 1) * REPORT_SIZE]
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
    begin, flags = world * REPORT_SIZE, size(world)
    ahead, lr_factor, *shares, num_generations = values[begin:flags]
    plan = None
    if ahead:
        plan = RankPlan(
            from_step=step + int(ahead), shares=tuple(map(int, shares)), lr_factor=lr_factor
        )
    return reports, plan, int(num_generations), [v > 0 for v in values[flags:]]
