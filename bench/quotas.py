"""Three workers under CPU quotas: every way to train, and the limit, in turns of a few steps.

The workers' curves are measured in every round, all three at once: what one can do while the
others compute too, waiting for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from statistics import fmean, median
from typing import Any

from bench.clusters import WARM, Cluster, Limit, best_split, equal, reduction_s, static
from bench.turns import Crew

PARTS = (0.25, 0.5, 0.75, 1.0, 1.25)  # of a fair share: where curves are measured
STEPS = 4  # of a turn
ROUNDS = 8
SAMPLES = 24576

NAMES = ("DDP equal", "DDP static", "DDP oracle", "proportional", "auto")
SLOWEST = "each step's slowest"
HEADER = ["cluster", "limit, samples/s", SLOWEST, *NAMES]
HEADER += ["auto over DDP equal", "of what is possible"]
HEADER += ["auto's shares", "best shares"]


class Curves:
    """Workers that train alone, under the quotas of the cluster."""

    def __init__(self, cluster: Cluster, last: ExitStack) -> None:
        self._cluster, self._exposed_s = cluster, reduction_s(cluster)
        self._crew = _crew(cluster, "alone", last)
        self._crew.tell("16 1")
        self._crew.limit(cluster.cores.at(0.0))
        self.measure()

    def measure(self) -> Limit:
        """The limit as it is now."""
        cores = self._cluster.cores.at(0.0)
        fair = [self._cluster.batch * own / sum(cores) for own in cores]
        points: list[dict[int, float]] = [{} for _ in cores]
        for part in PARTS:
            sizes = [max(1, round(part * share)) for share in fair]
            told = self._crew.tell(*(f"{size} {STEPS}" for size in sizes))
            for known, size, steps_s in zip(points, sizes, told, strict=True):
                known[size] = fmean(steps_s)
        return best_split(self._cluster, points, self._exposed_s)

    def slowest(self, shares: Sequence[int]) -> float:
        """Samples a second if every step took as long as it takes the slowest in that very step.

        The limit is made of each worker's mean; a step that all wait for is longer, by scatter.
        """
        told = self._crew.tell(*(f"{max(1, share)} {STEPS}" for share in shares))
        step_s = fmean(map(max, zip(*told, strict=True))) + self._exposed_s
        return self._cluster.batch / step_s


class Way:
    """One way to train, ready to take turns."""

    def __init__(
        self, cluster: Cluster, way: str, last: ExitStack, shares: Sequence[int] = ()
    ) -> None:
        given = ["--batch", str(cluster.batch), "--shares", ",".join(map(str, shares))]
        self._batch = cluster.batch
        self._crew = _crew(cluster, way, last, *given)
        self._crew.tell(1)  # groups and buffers are made in the first step
        self._crew.limit(cluster.cores.at(0.0))
        self._crew.tell(1 if shares else WARM)
        self.shares: list[int] = []

    def rate(self) -> float:
        """Samples a second, over one turn."""
        told: list[Any] = self._crew.tell(STEPS)
        self.shares = [rank["share"] for rank in told]
        return STEPS * self._batch / float(max(rank["seconds"] for rank in told))


def measured(cluster: Cluster) -> list[str]:
    """A line of the table: each way as a part of the limit of its round, the median over rounds."""
    with ExitStack() as last:
        curves = Curves(cluster, last)
        oracle = curves.measure().shares
        given = {"DDP equal": equal(cluster), "DDP static": static(cluster), "DDP oracle": oracle}
        ways = {name: Way(cluster, "ddp", last, shares) for name, shares in given.items()}
        ways |= {name: Way(cluster, name, last) for name in ("proportional", "auto")}
        limits = [curves.measure()]
        parts: dict[str, list[float]] = {name: [] for name in (SLOWEST, *NAMES)}
        for turn in range(ROUNDS):
            rates = {name: ways[name].rate() for name in NAMES[:: 1 if turn % 2 else -1]}
            rates[SLOWEST] = curves.slowest(limits[-1].shares)
            limits.append(curves.measure())
            top = fmean(limit.rate for limit in limits[-2:])
            for name, rate in rates.items():
                parts[name].append(rate / top)
            told = ", ".join(f"{name} {all_so_far[-1]:.2f}" for name, all_so_far in parts.items())
            print(f"{cluster.name}: limit {top:.0f}, {told}", flush=True)
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


def _crew(cluster: Cluster, way: str, last: ExitStack, *given: str) -> Crew:
    args = ["--workload", cluster.workload, "--way", way, "--samples", str(SAMPLES), *given]
    return Crew(args, cluster.world, last)
