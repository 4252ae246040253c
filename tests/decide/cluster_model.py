"""A small model of a cluster that drives one policy: true curves, changes and noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from evenstep.decide.curves import FlatLinear
from evenstep.decide.split import split
from evenstep.ports import BatchPolicy, Foresees
from evenstep.types import Fleet, FloatArray, IntArray, Outcome, Worker

Factor = Callable[[int], list[float]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of a policy: shares and time of each step, and the best possible time."""

    shares: list[IntArray]
    seconds: FloatArray  # of each step, without noise
    best_s: FloatArray

    @property
    def achieved(self) -> FloatArray:
        """Best over actual time of each step."""
        return self.best_s / self.seconds


def drive(
    policy: BatchPolicy,
    curves: FlatLinear,
    *,
    batch: int,
    num_steps: int,
    caps: list[int] | None = None,
    noise: float = 0.0,
    delays: FloatArray | None = None,
    factor: Factor | None = None,
    announced: bool = False,
    start: list[int] | None = None,
    new_size: float = 1.0,
    delay: int = 1,
) -> Run:
    """Run a policy on workers with these curves; `factor(step)` is the slowdown of each.

    `delays` are extra slowdowns by step and worker. A worker's first step at a larger share than
    ever takes up to `new_size` times as long. A plan takes effect `delay` steps after the step it
    was made on.
    """
    num = len(curves.fixed_s)
    rows = [Worker(id=f"w{i:03}", cap=caps[i] if caps else None) for i in range(num)]
    fleet = Fleet.of(rows, batch=batch)
    rng = np.random.default_rng(7)
    slower = factor or (lambda step: [1.0] * num)
    memory, (shares, _) = policy.first_shares(None, fleet, batch)
    if start is not None:
        shares = np.array(start, dtype=np.int64)
    history, seconds, best = [], [], []
    coming_shares = [shares] * delay
    max_share = np.zeros(num, dtype=np.int64)
    for step in range(num_steps):
        now, coming = np.array(slower(step)), np.array(slower(step + 1))
        shares = coming_shares.pop(0)
        warmup = 1.0 + (new_size - 1.0) * rng.random(num)
        true = curves.scaled(now * np.where(shares > max_share, warmup, 1.0))
        max_share = np.maximum(max_share, shares)
        took_s = true.seconds(shares) * np.exp(rng.normal(0, noise, num))
        if delays is not None:
            took_s *= delays[step]
        history.append(shares)
        seconds.append(float(true.seconds(shares).max()))
        true = curves.scaled(now)
        best.append(float(true.seconds(split(true, batch, fleet.lower, fleet.upper)).max()))
        outcome = Outcome(
            step=step,
            samples=shares,
            compute_s=np.where(shares > 0, took_s, np.nan),
            forecast_samples_per_s=np.full(num, np.nan),
        )
        if announced and isinstance(policy, Foresees):
            forecast = policy.pace(memory, fleet, outcome) * now / coming
            outcome = replace(outcome, forecast_samples_per_s=forecast)
        planned = coming_shares[-1] if coming_shares else shares
        memory, move = policy.next(memory, fleet, batch, planned, outcome)
        if move is not None:
            planned, reason = move
            assert reason
            assert planned.sum() == batch
            assert ((fleet.lower <= planned) & (planned <= fleet.upper)).all()
        coming_shares.append(planned)
    return Run(shares=history, seconds=np.array(seconds), best_s=np.array(best))


def line(
    fixed_ms: list[float], per_sample_ms: list[float], floor_ms: list[float] | None = None
) -> FlatLinear:
    """Curves given in milliseconds."""
    ms = 1e-3
    return FlatLinear(
        floor_s=np.array(floor_ms or [0.0] * len(fixed_ms)) * ms,
        fixed_s=np.array(fixed_ms) * ms,
        per_sample_s=np.array(per_sample_ms) * ms,
    )


def best_of_all_s(curves: FlatLinear, batch: int) -> float:
    """The minimal step time if every worker has at least one sample."""
    num = len(curves.fixed_s)
    shares = split(curves, batch, np.ones(num, dtype=np.int64), np.full(num, batch))
    return float(curves.seconds(shares).max())
