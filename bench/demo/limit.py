"""The limit of the demo's clusters, from step times of such workers, each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean

from bench.clusters import Cluster, Limit, best_split, step_times
from bench.demo.cores import Cores
from bench.demo.phases import Phase
from bench.quotas import reduction_s
from bench.turns import Ranks
from evenstep.emulate import steady

WORKLOAD = "cnn-double"
FRACTIONS = (0.25, 0.5, 0.9, 1.4, 2.25)  # of a fair share, at which step times are measured
STEPS = 2  # at each of them, in each turn


class Alone:
    """One process for each number of cores that a worker of the demo may have.

    They compute at the same time, as in the run, but wait for nobody. They take several turns
    between the parts of the demo, since the speed of a machine drifts.
    """

    def __init__(
        self, levels: Sequence[float], batch: int, samples: int, cores: Cores, cleanup: ExitStack
    ) -> None:
        self._levels, self._batch = tuple(levels), batch
        names = [str(rank) for rank in range(len(levels))]
        for name in names:
            cores.announce(name)
        args = ["--workload", WORKLOAD, "--way", "alone", "--samples", str(samples)]
        self._ranks = Ranks(args, len(levels), cleanup, cores.environment)
        cleanup.callback(self._ranks.kill)  # they have nothing to finish
        self._ranks.ask(f"{batch // 2} 1")
        for name, pid, own in zip(names, self._ranks.pids, levels, strict=True):
            cores.limit(name, pid, own)
        self._exposed_s = reduction_s(self._ranks, 20)
        self._seconds: list[dict[int, list[float]]] = [{} for _ in levels]

    def measure(self) -> None:
        """Take one more turn."""
        total = sum(self._levels)
        for fraction in FRACTIONS:
            fair = [fraction * self._batch * own / total for own in self._levels]
            sizes = [max(1, min(round(share), self._batch)) for share in fair]
            answers = self._ranks.ask(*(f"{size} {STEPS}" for size in sizes))
            for curve, size, steps_s in zip(self._seconds, sizes, answers, strict=True):
                curve.setdefault(size, []).extend(steps_s)

    def limit(self, cores: Sequence[float], phase: Phase) -> Limit:
        """The best shares of workers with these cores, by all turns so far.

        A machine may be faster during the run than in any turn, as when other work on it ends. Then
        the limit is as much faster too: by the workers' compute times in the run, one factor for
        all. It is never slower than measured.
        """
        curves = [self._seconds[self._levels.index(own)] for own in cores]
        points = [{size: fmean(steps_s) for size, steps_s in curve.items()} for curve in curves]
        cluster = Cluster(name="demo", workload=WORKLOAD, batch=self._batch, cores=steady(cores))
        best = best_split(cluster, points, self._exposed_s)
        rows = zip(points, phase.shares, strict=True)
        alone_s = sum(step_times(measured, self._batch)[share] for measured, share in rows)
        faster = min(1.0, sum(phase.compute_s) / alone_s)
        return replace(best, compute_s=best.compute_s * faster, exposed_s=best.exposed_s * faster)
