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

Curve = dict[int, float]
"""Seconds of a step, by the share."""

Turn = list[Curve]
"""For each number of cores."""


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
        self._turns: list[Turn] = []

    def measure(self) -> None:
        """Take one more turn."""
        total, turn = sum(self._levels), [Curve() for _ in self._levels]
        for fraction in FRACTIONS:
            fair = [fraction * self._batch * own / total for own in self._levels]
            sizes = [max(1, min(round(share), self._batch)) for share in fair]
            answers = self._ranks.ask(*(f"{size} {STEPS}" for size in sizes))
            for curve, size, steps_s in zip(turn, sizes, answers, strict=True):
                curve[size] = fmean(steps_s)
        self._turns.append(turn)

    @property
    def spread(self) -> float:
        """How much longer the slowest turn took than the fastest, as a part of that."""
        totals = [sum(sum(curve.values()) for curve in turn) for turn in self._turns]
        return max(totals) / min(totals) - 1

    def limits(self, clusters: Sequence[Sequence[float]], phases: Sequence[Phase]) -> list[Limit]:
        """The best shares of workers with these cores, for the phases between the last two turns.

        A speed of the machine that changes from one turn to the other is taken to do so steadily.
        """
        whole_s, ended_s, found = sum(phase.seconds for phase in phases), 0.0, []
        for cores, phase in zip(clusters, phases, strict=True):
            middle = (ended_s + phase.seconds / 2) / whole_s
            found.append(self._limit(cores, phase, middle))
            ended_s += phase.seconds
        return found

    def _limit(self, cores: Sequence[float], phase: Phase, part: float) -> Limit:
        """Of one phase, at a part of the way between the two turns.

        The machine may be faster during the run than in both, as when other work on it ends. Then
        the limit is as much faster too: by the workers' compute times in the run, one factor for
        all. It is never slower than measured.
        """
        before, after = self._turns[-2:]
        points = []
        for level in (self._levels.index(own) for own in cores):
            early, late = before[level], after[level]
            points.append({size: early[size] + part * (late[size] - early[size]) for size in early})
        cluster = Cluster(name="demo", workload=WORKLOAD, batch=self._batch, cores=steady(cores))
        best = best_split(cluster, points, self._exposed_s)
        rows = zip(points, phase.shares, strict=True)
        alone_s = sum(step_times(measured, self._batch)[share] for measured, share in rows)
        faster = min(1.0, sum(phase.compute_s) / alone_s)
        return replace(best, compute_s=best.compute_s * faster, exposed_s=best.exposed_s * faster)
