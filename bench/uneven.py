"""Uneven training against plain DDP, against the best possible split, and against the limit.

    python -m bench.uneven                      # everything: about three quarters of an hour
    python -m bench.uneven devices quotas       # some of: devices quotas changes target equal

Every ratio compares runs that took turns on one machine. The tables go to docs/bench.md.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

import numpy as np
import psutil
import torch

from bench.clusters import (
    WARM,
    Cluster,
    Limit,
    Run,
    device_cluster,
    equal_shares,
    exposed_s,
    limit,
    static_shares,
    train,
)
from bench.equal import compare_with_ddp
from bench.quotas import HEADER as QUOTAS
from bench.quotas import measured
from bench.tables import markdown, write
from evenstep.emulate import h_level, steady
from evenstep.emulate.schedule import Levels

ROUNDS = 2
MADE_BY = "python -m bench.uneven"

MIXES = (
    device_cluster("a=5,5,5,20 c=.25,.5,1,1", (5, 5, 5, 20), (0.25, 0.5, 1, 1)),
    device_cluster("two kinds, 2 to 1", (6, 6, 6, 6), (0.4, 0.4, 0.8, 0.8)),
    device_cluster("large fixed parts", (18, 12, 25, 15), (0.2, 0.6, 0.3, 1.2)),
    device_cluster("four kinds", (8, 8, 4, 4), (0.2, 0.3, 0.6, 1.2)),
    # Its fixed cost alone exceeds a step of the others: it should leave, not be balanced.
    device_cluster("one far behind", (5, 5, 5, 60), (0.3, 0.3, 0.3, 3.0)),
)


def with_quotas(h: float) -> Cluster:
    """Three workers on 1.5 of the two cores, with a largest-to-smallest ratio of H."""
    cores = h_level(3, h, 1.5, max_cores=1.0) if h > 1 else (0.5, 0.5, 0.5)
    return Cluster(name=f"H = {h:g}", workload="cnn", batch=3072, cores=steady(cores))


class Ways:
    """All ways to train on one cluster, in turn, over several rounds."""

    def __init__(
        self, cluster: Cluster, measure: Callable[[], Limit], steps: int, rounds: int
    ) -> None:
        """The limit is measured in every round, because the machine's speed drifts."""
        self.cluster = cluster
        self.limits: list[Limit] = []
        self.runs: dict[str, list[Run]] = {}
        for _ in range(rounds):
            self.limits.append(measure())
            given = {
                "DDP equal": equal_shares(cluster),
                "DDP static": static_shares(cluster),
                "DDP oracle": list(self.limits[-1].shares),
            }
            for name, shares in given.items():
                if min(shares) > 0:  # DDP cannot leave a worker out
                    self._add(name, train(cluster, "ddp", steps, shares))
            for policy in ("proportional", "auto"):
                self._add(policy, train(cluster, policy, steps))

    def _add(self, name: str, run: Run) -> None:
        self.runs.setdefault(name, []).append(run)

    def part(self, name: str, skip: int = WARM) -> float:
        """Throughput relative to the limit of its round: the median over rounds."""
        runs = self.runs.get(name, [])
        parts = [run.rate(skip) / top.rate for run, top in zip(runs, self.limits, strict=False)]
        return median(parts) if parts else float("nan")

    def row(self) -> list[str]:
        """A table row: each way relative to the limit, then the gain over DDP."""
        names = ("DDP equal", "DDP static", "DDP oracle", "proportional", "auto")
        parts = [*(self.part(name) for name in names), self.part("auto", 0)]
        auto, base = self.part("auto"), self.part("DDP equal")
        return [
            self.cluster.name,
            f"{median(top.rate for top in self.limits):.0f}",
            *(f"{part:.2f}" if part == part else "-" for part in parts),
            f"{auto / base:.2f}x",
            f"{auto:.2f}",
            " ".join(map(str, self.runs["auto"][-1].shares[-1])),
            " ".join(map(str, self.limits[-1].shares)),
        ]


HEADER = ["cluster", "limit, samples/s", "DDP equal", "DDP static", "DDP oracle", "proportional"]
HEADER += ["auto", "auto from step 1", "auto over DDP equal", "of what is possible"]
HEADER += ["auto's shares", "best shares"]


def devices() -> None:
    """Four emulated devices, in several mixes."""
    exposed = exposed_s(MIXES[0])
    print(f"exposed reduction {exposed * 1000:.1f} ms", flush=True)
    rows = [Ways(mix, partial(limit, mix, exposed), 150, ROUNDS).row() for mix in MIXES]
    _table("devices", HEADER, rows)


def quotas() -> None:
    """Three workers under CPU quotas, with a constant total."""
    rows = [measured(with_quotas(h)) for h in (1, 2, 6, 10)]
    _table("quotas", QUOTAS, rows)


def changes() -> None:
    """A worker that becomes slower for good, and one that is disturbed periodically."""
    mix = MIXES[0]
    exposed = exposed_s(mix)
    calm, hit = (1.0, 1.0, 1.0, 1.0), (3.0, 1.0, 1.0, 1.0)
    once = replace(mix, name="w0 three times slower from step 60", slowdowns=((60, hit),))
    stages = tuple((step, hit if i % 2 else calm) for i, step in enumerate(range(0, 240, 30)))
    periodic = replace(mix, name="w0 disturbed for 30 of every 60 steps", slowdowns=stages)
    rows = []
    for cluster, steps in ((once, 120), (periodic, 240)):
        runs = {
            policy: [train(cluster, policy, steps) for _ in range(ROUNDS)]
            for policy in ("uniform", "proportional", "auto")
        }
        bests: dict[Levels, Limit] = {
            levels: limit(cluster, exposed, levels) for levels in (calm, hit)
        }
        for policy, tried in runs.items():
            rows.append(_change_row(cluster, policy, tried, bests))
    header = ["change", "policy", "of the limit", "steps until within 5 % of it, each change"]
    _table("changes", header, rows)


def _change_row(
    cluster: Cluster, policy: str, runs: Sequence[Run], bests: Mapping[Levels, Limit]
) -> list[str]:
    def levels_at(step: int) -> Levels:
        begun = [levels for begin, levels in cluster.slowdowns if begin <= step]
        return begun[-1] if begun else (1.0,) * cluster.world

    num = len(runs[0].seconds)
    ideal_s = sum(cluster.batch / bests[levels_at(i + 1)].rate for i in range(num))
    parts = [ideal_s / float(run.seconds.sum()) for run in runs]
    changes = [begin for begin, _ in cluster.slowdowns if begin > 0]
    took = [
        max(_steps_until(run, begin, end, cluster, levels_at(begin), bests) for run in runs)
        for begin, end in pairwise([*changes, num + 1])
    ]
    return [cluster.name, policy, f"{median(parts):.2f}", " ".join(f"{t:g}" for t in took)]


def _steps_until(
    run: Run, begin: int, end: int, cluster: Cluster, levels: Levels, bests: Mapping[Levels, Limit]
) -> float:
    """Steps after a change until the shares stay within 5 % of the limit.

    By the devices' curves, not by the clock: step times vary by more than 5 % on a busy machine.
    """
    best = bests[levels]
    curves = [d.slowed(f) for d, f in zip(cluster.devices, levels, strict=True)]
    late = [
        step
        for step in range(begin, end)
        if max(c.seconds(int(n)) for c, n in zip(curves, run.shares[step], strict=True))
        + best.exposed_s
        > 1.05 * (best.compute_s + best.exposed_s)
    ]
    if not late:
        return 0
    return late[-1] + 1 - begin if late[-1] + 1 < end else float("inf")


def target() -> None:
    """Seconds to reach a loss; all policies train on the same samples in the same order."""
    rows = []
    for cluster in (replace(MIXES[0], name="devices, first mix"), with_quotas(6)):
        steps = 150 if cluster.devices else 60
        runs = {p: train(cluster, p, steps) for p in ("uniform", "proportional", "auto")}
        goal = float(
            np.convolve(runs["uniform"].losses, np.full(10, 0.1), mode="valid")[steps * 2 // 3]
        )
        seconds = {p: run.seconds_to(goal) for p, run in runs.items()}
        base = seconds["uniform"]
        rows.append(
            [
                cluster.name,
                f"{goal:.3f}",
                *(f"{s:.1f} s ({base / s:.2f}x)" for s in seconds.values()),
            ]
        )
    _table("target", ["cluster", "loss", "uniform", "proportional", "auto"], rows)


def equals() -> None:
    """Against plain DDP on equal workers."""
    rows = []
    for workload, batch, turns, steps in (
        ("cnn", 64, 200, 5),
        ("resnet", 32, 60, 2),
        ("transformer", 32, 80, 2),
    ):
        done = compare_with_ddp(workload, batch, turns=turns, steps=steps, warm=60, launches=4)
        rows.append(
            [workload, f"{done.ddp_s * 1000:.1f} ms", f"{done.ratio:.3f} ± {done.uncertainty:.3f}"]
        )
    _table("equal", ["workload", "DDP's step", "evenstep / DDP"], rows)
    done = compare_with_ddp("wide", 64, turns=10, steps=2, warm=5)
    slow = compare_with_ddp("slow", 64, turns=20, steps=2, warm=5)
    rows = [
        [
            "highest memory of a rank, MB",
            f"{done.ddp_peak_bytes / 1e6:.0f}",
            f"{done.peak_bytes / 1e6:.0f}",
        ],
        ["step, ms", f"{done.ddp_s * 1000:.0f}", f"{done.ddp_s * done.ratio * 1000:.0f}"],
        [
            "step with 100 ms of pauses in backward, ms",
            f"{slow.ddp_s * 1000:.0f}",
            f"{slow.ddp_s * slow.ratio * 1000:.0f}",
        ],
    ]
    _table("wide", ["ten million parameters", "DDP", "evenstep"], rows)


def _table(name: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = markdown(header, rows)
    print(f"{name}\n{table}\n", flush=True)
    write("bench.md", name, table, MADE_BY)


SECTIONS: dict[str, Callable[[], None]] = {
    "devices": devices,
    "quotas": quotas,
    "changes": changes,
    "target": target,
    "equal": equals,
}


def main() -> None:
    """Run the sections named on the command line."""
    names = sys.argv[1:] or list(SECTIONS)
    unknown = set(names) - SECTIONS.keys()
    if unknown:
        raise SystemExit(f"no section {min(unknown)}; choose from {', '.join(SECTIONS)}")
    memory = psutil.virtual_memory().total / 2**30
    machine = f"{psutil.cpu_count()} cores, {memory:.0f} GiB, no GPU, {platform.machine()}"
    write(
        "bench.md",
        "machine",
        f"{machine}, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}, "
        f"torch {torch.__version__}",
        MADE_BY,
    )
    for name in names:
        SECTIONS[name]()


if __name__ == "__main__":
    main()
