"""Three workers under CPU quotas: every way to train, and the limit, in turns of a few steps.

The workers' curves are measured in every round, all three at once: each while the others compute
too, but without waiting for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from statistics import fmean, median
from typing import Any

import numpy as np

from bench.clusters import (
    WARM,
    Cluster,
    Limit,
    best_split,
    equal_shares,
    static_shares,
)
from bench.turns import Ranks

FRACTIONS = (0.25, 0.5, 0.75, 1.0, 1.25)  # of a fair share, at which curves are measured
STEPS = 4  # per turn
ROUNDS = 8
SAMPLES = 24576

NAMES = ("DDP equal", "DDP static", "DDP oracle", "proportional", "auto")
SLOWEST = "each step's slowest"
HEADER = ["cluster", "limit, samples/s", SLOWEST, *NAMES]
HEADER += ["auto over DDP equal", "of what is possible"]
HEADER += ["auto's shares", "best shares"]


class Curves:
    """Workers that train alone, under the quotas of the cluster."""

    def __init__(self, cluster: Cluster, cleanup: ExitStack) -> None:
        self._cluster, self._ranks = cluster, _ranks(cluster, "alone", cleanup)
        self._ranks.ask("16 1")
        self._ranks.limit(cluster.cores.at(0.0))
        self._exposed_s = reduction_s(self._ranks)
        self.measure()

    def measure(self) -> Limit:
        """Measure the current limit."""
        cores = self._cluster.cores.at(0.0)
        fair = [self._cluster.batch * own / sum(cores) for own in cores]
        points: list[dict[int, float]] = [{} for _ in cores]
        for fraction in FRACTIONS:
            sizes = [max(1, round(fraction * share)) for share in fair]
            answers = self._ranks.ask(*(f"{size} {STEPS}" for size in sizes))
            for curve, size, steps_s in zip(points, sizes, answers, strict=True):
                curve[size] = fmean(steps_s)
        return best_split(self._cluster, points, self._exposed_s)

    def slowest(self, shares: Sequence[int]) -> float:
        """Samples per second if every step took as long as its slowest worker.

        The limit uses each worker's mean; noise makes the slowest worker of a step slower.
        """
        answers = self._ranks.ask(*(f"{max(1, share)} {STEPS}" for share in shares))
        step_s = fmean(map(max, zip(*answers, strict=True))) + self._exposed_s
        return self._cluster.batch / step_s


class Way:
    """One way to train, ready for its turns."""

    def __init__(
        self, cluster: Cluster, way: str, cleanup: ExitStack, shares: Sequence[int] = ()
    ) -> None:
        given = ["--batch", str(cluster.batch), "--shares", ",".join(map(str, shares))]
        self._batch = cluster.batch
        self._ranks = _ranks(cluster, way, cleanup, *given)
        self._ranks.ask(1)  # the first step creates groups and buffers
        self._ranks.limit(cluster.cores.at(0.0))
        self._ranks.ask(1 if shares else WARM)
        self.shares: list[int] = []

    def rate(self) -> float:
        """Samples per second over one turn."""
        answers: list[Any] = self._ranks.ask(STEPS)
        self.shares = [rank["share"] for rank in answers]
        return STEPS * self._batch / float(max(rank["seconds"] for rank in answers))


def measured(cluster: Cluster) -> list[str]:
    """A table row: each way relative to the limit of its round, median over rounds."""
    with ExitStack() as cleanup:
        curves = Curves(cluster, cleanup)
        oracle = curves.measure().shares
        given = {
            "DDP equal": equal_shares(cluster),
            "DDP static": static_shares(cluster),
            "DDP oracle": oracle,
        }
        ways = {name: Way(cluster, "ddp", cleanup, shares) for name, shares in given.items()}
        ways |= {name: Way(cluster, name, cleanup) for name in ("proportional", "auto")}
        limits = [curves.measure()]
        parts: dict[str, list[float]] = {name: [] for name in (SLOWEST, *NAMES)}
        for turn in range(ROUNDS):
            rates = {name: ways[name].rate() for name in NAMES[:: 1 if turn % 2 else -1]}
            rates[SLOWEST] = curves.slowest(limits[-1].shares)
            limits.append(curves.measure())
            top = fmean(limit.rate for limit in limits[-2:])
            for name, rate in rates.items():
                parts[name].append(rate / top)
            newest = ", ".join(f"{name} {values[-1]:.2f}" for name, values in parts.items())
            print(f"{cluster.name}: limit {top:.0f}, {newest}", flush=True)
        shares = ways["auto"].shares
    part = {name: median(parts[name]) for name in parts}
    return [
        cluster.name,
        f"{median(limit.rate for limit in limits):.0f}",
        *(f"{part[name]:.2f}" for name in (SLOWEST, *NAMES)),
        f"{part['auto'] / part['DDP equal']:.2f}x",
        f"{part['auto']:.2f}",
        " ".join(map(str, shares)),
        " ".join(map(str, limits[-1].shares)),
    ]


def reduction_s(ranks: Ranks, steps: int = 60) -> float:
    """Time of the gradient reduction alone, under the quotas of ranks that compute alone.

    If the CPU is the bottleneck, the reduction cannot overlap with compute.
    """
    return float(np.median(np.max(ranks.ask(f"0 {steps}"), axis=0)))


def _ranks(cluster: Cluster, way: str, cleanup: ExitStack, *given: str) -> Ranks:
    args = ["--workload", cluster.workload, "--way", way, "--samples", str(SAMPLES), *given]
    return Ranks(args, cluster.world, cleanup)
