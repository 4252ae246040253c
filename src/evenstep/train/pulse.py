"""The pulse: one small sum beside the gradients, by which all ranks learn the same at one step.

Every rank fills in its own report and leaves the others' zero, and flags the parameters it has a
gradient for; the leader fills in the newest plan. After the sum everyone holds all reports and the
plan, with no further round trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

REPORT = 6  # samples, compute_s, wait_s, free_cpu, free_memory, weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank measured, before it has a worker's name."""

    samples: int
    compute_s: float
    wait_s: float
    free_cpu: float
    free_memory: float
    weight: float  # what this rank's mean counts for: samples, or tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """Shares by rank, valid from a step on."""

    from_step: int
    shares: tuple[int, ...]


def fill(
    world: int, rank: int, report: Report, plan: RankPlan | None, used: Sequence[bool]
) -> torch.Tensor:
    """This rank's part of the pulse. Double precision holds every count exactly."""
    pulse = torch.zeros(world * REPORT + 1 + world + len(used), dtype=torch.float64)
    row = (
        report.samples,
        report.compute_s,
        report.wait_s,
        report.free_cpu,
        report.free_memory,
        report.weight,
    )
    pulse[rank * REPORT : (rank + 1) * REPORT] = torch.tensor(row, dtype=torch.float64)
    begin, flags = world * REPORT, world * REPORT + 1 + world
    if plan is not None:
        pulse[begin:flags] = torch.tensor([plan.from_step + 1, *plan.shares]).double()
    pulse[flags:] = torch.tensor(used, dtype=torch.float64)
    return pulse


def read(pulse: torch.Tensor, world: int) -> tuple[list[Report], RankPlan | None, list[bool]]:
    """All reports by rank, the plan if the leader sent one, and the parameters anyone used."""
    values = pulse.tolist()
    reports = []
    for rank in range(world):
        samples, *rest = values[rank * REPORT : (rank + 1) * REPORT]
        compute_s, wait_s, free_cpu, free_memory, weight = rest
        reports.append(
            Report(
                samples=int(samples),
                compute_s=compute_s,
                wait_s=wait_s,
                free_cpu=free_cpu,
                free_memory=free_memory,
                weight=weight,
            )
        )
    begin, flags = world * REPORT, world * REPORT + 1 + world
    from_step, *shares = (int(v) for v in values[begin:flags])
    plan = RankPlan(from_step=from_step - 1, shares=tuple(shares)) if from_step else None
    return reports, plan, [v > 0 for v in values[flags:]]
