"""The simulated hardware as columns: true step times, slowdowns and noise.

A slot holds one worker at a time: first the slots of the scenario's workers, then those of the
pool. Noise is drawn by (seed, step, slot), so every policy gets the same noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.decide.curves import AnyMonotone, FlatLinear
from evenstep.ports import Curves
from evenstep.simulate.scenario import Scenario, WorkerGroup
from evenstep.types import MOST_SAMPLES, FloatArray, IntArray, Worker

EPSILON_S = 1e-12


class World:
    """All slots of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        groups = (*scenario.workers, *scenario.pool)
        self.groups = [g for g in groups for _ in range(g.count)]
        self.late_s = np.array([k * g.stagger_s for g in groups for k in range(g.count)])
        self.num_initial = sum(g.count for g in scenario.workers)
        self.names = _names(self.groups)
        self.caps = np.array([g.cap or MOST_SAMPLES for g in self.groups], dtype=np.int64)
        self._floor_s = np.array([g.floor_s for g in self.groups])
        self._fixed_s = np.array([g.fixed_s for g in self.groups])
        self._per_sample_s = np.array([g.per_sample_s for g in self.groups])
        self._tables = [_Table.of(g) for g in groups if g.throughput]
        by_group = {id(t.group): i for i, t in enumerate(self._tables)}
        self._table = np.array([by_group.get(id(g), -1) for g in self.groups], dtype=np.int64)
        jitter = np.array([g.jitter for g in self.groups])
        self._sigma = np.sqrt(np.log1p(jitter**2))
        self._noise = np.array([g.free_cpu_noise for g in self.groups])
        self._seed = scenario.seed
        changes = [(i, c) for i, g in enumerate(self.groups) for c in g.changes]
        self._changed_slot = np.array([i for i, _ in changes], dtype=np.int64)
        self._at_s = np.array([c.at_s for _, c in changes]) + self.late_s[self._changed_slot]
        self._lasts_s = np.array([(c.until_s or np.inf) - c.at_s for _, c in changes])
        self._every_s = np.array([c.every_s or np.inf for _, c in changes])
        self._factor = np.array([c.factor for _, c in changes])
        self._ramp_s = np.array([c.ramp_s for _, c in changes])
        self._announced = np.array([c.announced for _, c in changes], dtype=bool)

    def __len__(self) -> int:
        return len(self.groups)

    def slowdown(self, at_s: float) -> tuple[FloatArray, FloatArray]:
        """Slowdown factor of each slot: in total, and the announced part of it."""
        total, announced = np.ones(len(self)), np.ones(len(self))
        if len(self._changed_slot):
            since_s = np.mod(at_s - self._at_s, self._every_s)
            on = (at_s >= self._at_s) & (since_s < self._lasts_s)
            # EPSILON_S on both sides, so that a slowdown without a ramp applies at once.
            grown = np.minimum((since_s + EPSILON_S) / (self._ramp_s + EPSILON_S), 1.0)
            factor = 1.0 + (self._factor - 1.0) * np.where(on, grown, 0.0)
            np.multiply.at(total, self._changed_slot, factor)
            np.multiply.at(announced, self._changed_slot, np.where(self._announced, factor, 1.0))
        return total, announced

    def jitter(self, step: int) -> FloatArray:
        """Noise factor of each slot's step time; 1 on average."""
        if not self._sigma.any():
            return np.ones(len(self))
        normal = np.random.default_rng([self._seed, step]).standard_normal(len(self))
        jitter: FloatArray = np.exp(self._sigma * normal - self._sigma**2 / 2)
        return jitter

    def free_cpu(self, at_s: float, step: int) -> FloatArray:
        """Free CPU that each slot reports for the next step."""
        free = 1.0 / self.slowdown(at_s)[1]
        if self._noise.any():
            normal = np.random.default_rng([self._seed, step, 1]).standard_normal(len(self))
            free = free * (1.0 + self._noise * normal)
        return np.clip(free, 0.0, 1.0)

    def curves(self, slots: IntArray, slowdown: FloatArray, batch: int) -> Curves:
        """The true curves of the workers in some slots under a slowdown, up to a batch."""
        lines = FlatLinear(
            floor_s=self._floor_s[slots] * slowdown,
            fixed_s=self._fixed_s[slots] * slowdown,
            per_sample_s=self._per_sample_s[slots] * slowdown,
        )
        table = self._table[slots]
        rows = {t: np.flatnonzero(table == t) for t in np.unique(table[table >= 0]).tolist()}
        if not rows:
            return lines

        def seconds(shares: IntArray) -> FloatArray:
            times = lines.seconds(shares)
            for t, row in rows.items():
                times[row] = self._tables[t].seconds(shares[row]) * slowdown[row]
            return times

        return AnyMonotone(function=seconds, upper=np.minimum(self.caps[slots], batch))

    def worker(self, slot: int, life: int) -> Worker:
        """The description of the `life`-th worker in a slot; every worker has its own id."""
        group, name = self.groups[slot], self.names[slot]
        samples_per_s = None
        if group.warmup_share:
            share = np.array([group.warmup_share])
            alone_s = self.curves(np.array([slot]), np.ones(1), group.warmup_share).seconds(share)
            samples_per_s = group.warmup_share / float(alone_s[0])
        return Worker(
            id=name if life == 1 else f"{name}.{life}",
            kind=group.kind,
            cores=group.cores,
            flops=group.flops,
            cap=group.cap,
            price_per_hour=group.price,
            warmup_samples_per_s=samples_per_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Table:
    """Step times from a throughput table, interpolated between its rows.

    Below the first row the step time is constant; above the last row the throughput is.
    """

    group: WorkerGroup
    shares: FloatArray
    samples_per_s: FloatArray

    @classmethod
    def of(cls, group: WorkerGroup) -> _Table:
        rows = np.array(sorted(group.throughput.items()), dtype=np.float64)
        return cls(group=group, shares=rows[:, 0], samples_per_s=rows[:, 1])

    def seconds(self, shares: IntArray) -> FloatArray:
        samples_per_s = np.interp(shares, self.shares, self.samples_per_s)
        return np.where(shares > 0, np.maximum(shares, self.shares[0]) / samples_per_s, 0.0)


def _names(groups: list[WorkerGroup]) -> list[str]:
    """`kind-number`, padded so that ids sort in the order of slots."""
    width, seen, names = len(str(len(groups) - 1)), dict.fromkeys((g.kind for g in groups), 0), []
    for group in groups:
        names.append(f"{group.kind}-{seen[group.kind]:0{width}d}")
        seen[group.kind] += 1
    return names
