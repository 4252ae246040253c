"""Uneven clusters on this machine: training on them, and the limit of their throughput."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.turns import KEEP_MEMORY
from evenstep.decide.curves import AnyMonotone
from evenstep.decide.split import in_proportion, split
from evenstep.emulate import DeviceCurve, run_uneven
from evenstep.emulate.schedule import Levels, Schedule, steady
from evenstep.types import FloatArray, IntArray

WARM = 20  # steps for a policy to find its shares before its rate is measured
BOUND_S = 240.0
MIN_EPOCH = 8  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Workers with some cores or with emulated devices, their workload and global batch."""

    name: str
    workload: str
    batch: int
    cores: Schedule
    devices: tuple[DeviceCurve, ...] = ()
    slowdowns: tuple[tuple[int, Levels], ...] = ()  # (from step, factor by rank) of the devices

    @property
    def world(self) -> int:
        """Number of workers."""
        return self.cores.num_workers


def device_cluster(name: str, fixed_ms: Sequence[float], per_sample_ms: Sequence[float]) -> Cluster:
    """Devices on which b samples take a + c * b; they train a small network."""
    devices = tuple(
        DeviceCurve(fixed_s=a / 1000, per_sample_s=c / 1000)
        for a, c in zip(fixed_ms, per_sample_ms, strict=True)
    )
    unlimited = steady([math.inf] * len(devices))
    return Cluster(name=name, workload="mlp", batch=128, cores=unlimited, devices=devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A measured run: when each step ended, each worker's share, and the mean loss."""

    batch: int
    ends_s: FloatArray
    shares: IntArray  # [step, rank]
    losses: FloatArray

    @property
    def seconds(self) -> FloatArray:
        """Seconds per step."""
        return np.diff(self.ends_s)

    def rate(self, skip: int = 0) -> float:
        """Samples per second, from a step on."""
        return self.batch / float(fmean(self.seconds[skip:]))

    @property
    def smooth_losses(self) -> FloatArray:
        """Moving average of the loss over ten steps."""
        return np.convolve(self.losses, np.full(10, 0.1), mode="valid")

    def seconds_to(self, loss: float) -> float:
        """Seconds until the average loss of ten steps falls to a value; inf if it never does."""
        below = np.flatnonzero(self.smooth_losses <= loss + 1e-6)
        return float(self.ends_s[below[0] + 9] - self.ends_s[0]) if len(below) else math.inf


def train(
    cluster: Cluster, way: str, steps: int, shares: Sequence[int] = (), journal: Path | None = None
) -> Run:
    """Run once; `way` is ddp with given shares, or a policy of evenstep."""
    ranks = _run(
        cluster,
        ["--way", way, "--batch", str(cluster.batch), "--shares", ",".join(map(str, shares))],
        ["--steps", str(steps), *(["--journal", str(journal)] if journal else [])],
    )
    by_rank = np.array([rank["shares"] for rank in ranks]).T
    losses = np.array([rank["losses"] for rank in ranks]).T
    return Run(
        batch=sum(shares) if shares else cluster.batch,
        ends_s=np.array(ranks[0]["ends_s"]),
        shares=by_rank,
        losses=(by_rank * losses).sum(1) / by_rank.sum(1),
    )


def equal_shares(cluster: Cluster) -> list[int]:
    """Equal shares, as far as the batch divides."""
    ones = np.ones(cluster.world)
    return _in_proportion(cluster, ones)


def static_shares(cluster: Cluster) -> list[int]:
    """Shares in proportion to nominal speed: cores, or the devices' samples per second."""
    if cluster.devices:
        return _in_proportion(cluster, np.array([1 / d.per_sample_s for d in cluster.devices]))
    return _in_proportion(cluster, np.array(cluster.cores.at(0.0)))


def _in_proportion(cluster: Cluster, weights: FloatArray) -> list[int]:
    lower = np.ones(cluster.world, dtype=np.int64)
    upper = np.full(cluster.world, cluster.batch)
    return list(map(int, in_proportion(weights, cluster.batch, lower, upper)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The best shares and their step time: the slowest worker, then the exposed reduction."""

    shares: tuple[int, ...]
    compute_s: float
    exposed_s: float
    batch: int

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.batch / (self.compute_s + self.exposed_s)


def limit(cluster: Cluster, exposed_s: float, slowdown: Levels | None = None) -> Limit:
    """The limit of a cluster of devices, from their known curves."""
    factors = slowdown or (1.0,) * cluster.world
    curves = [d.slowed(f) for d, f in zip(cluster.devices, factors, strict=True)]
    tables = [[c.seconds(b) for b in range(cluster.batch + 1)] for c in curves]
    return _best(np.array(tables), cluster.batch, exposed_s)


def best_split(cluster: Cluster, points: Sequence[Mapping[int, float]], exposed_s: float) -> Limit:
    """The limit of workers whose step times were measured at some shares."""
    tables = [step_times(measured, cluster.batch) for measured in points]
    return _best(np.array(tables), cluster.batch, exposed_s)


def _best(table: FloatArray, batch: int, exposed_s: float) -> Limit:
    world = len(table)

    def seconds(shares: IntArray) -> FloatArray:
        return table[np.arange(world), shares]

    upper = np.full(world, batch)
    best = split(AnyMonotone(function=seconds, upper=upper), batch, np.zeros_like(upper), upper)
    slowest_s = float(seconds(best).max())
    return Limit(shares=tuple(best.tolist()), compute_s=slowest_s, exposed_s=exposed_s, batch=batch)


def step_times(points: Mapping[int, float], batch: int) -> list[float]:
    """Step time for every share from 0 to the batch, interpolated and extrapolated linearly."""
    sizes, seconds = np.array(list(points)), np.maximum.accumulate(list(points.values()))
    slope, _ = np.polyfit(sizes, seconds, 1)
    line = np.interp(np.arange(batch + 1), sizes, seconds)
    beyond = seconds[-1] + slope * (np.arange(batch + 1) - sizes[-1])
    line = np.where(np.arange(batch + 1) > sizes[-1], beyond, line)
    line[0] = 0.0
    return line.tolist()


def exposed_s(cluster: Cluster, steps: int = 100) -> float:
    """Step time of plain DDP beyond compute, if all workers are ready at once.

    Measured without quotas, on devices that take 20 ms for any share.
    """
    same = tuple(DeviceCurve(per_sample_s=0.0, fixed_s=0.02) for _ in range(cluster.world))
    free = steady([math.inf] * cluster.world)
    idle = replace(cluster, devices=same, slowdowns=(), cores=free, batch=cluster.world)
    return max(0.0, float(np.median(train(idle, "ddp", steps, equal_shares(idle)).seconds)) - 0.02)


def _run(cluster: Cluster, *args: list[str]) -> list[dict[str, Any]]:
    device = ""
    if cluster.devices:
        curves = [asdict(d) for d in cluster.devices]
        device = json.dumps({"curves": curves, "slowdowns": cluster.slowdowns})
    command = [sys.executable, "-m", "bench.rank", "--workload", cluster.workload]
    command += ["--samples", str(max(4096, MIN_EPOCH * cluster.batch)), "--device", device]
    command += [*(arg for some in args for arg in some)]
    results = run_uneven(
        command, cluster.cores, timeout_s=BOUND_S, firm=True, line_up=True, env=KEEP_MEMORY
    )
    return [json.loads(worker.output.strip().splitlines()[-1]) for worker in results]
