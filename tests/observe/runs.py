"""Runs for tests of what people see: random rosters, steps and decisions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec import UNSET

from evenstep.config import BatchSettings, Settings
from evenstep.journal import Journal, Record
from evenstep.types import (
    AnyAction,
    Drain,
    Estimate,
    Joined,
    Launch,
    Left,
    Lost,
    Pause,
    Plan,
    Regroup,
    Stay,
    StepDone,
    StepReport,
    Steps,
    Worker,
    WorkerId,
)

SETTINGS = Settings(batch=BatchSettings(size=96))


def random_records(seed: int, num: int = 60) -> list[Record]:
    """A made-up run: workers come, go and die, steps are quiet now and then."""
    rng = np.random.default_rng(seed)
    there: list[WorkerId] = []
    records, at_s, step, generation, named = [], float(rng.uniform(0, 5)), 0, 0, 0
    for _ in range(num):
        at_s += float(rng.exponential(0.3))
        chance = rng.random()
        if not there or chance < 0.07:
            new = [f"w{named + i}" for i in range(rng.integers(1, 4))]
            named += len(new)
            there += new
            workers = tuple(Worker(id=w, price_per_hour=float(rng.integers(0, 3))) for w in new)
            event = Joined(workers=workers)
        elif chance < 0.14:
            gone = there.pop(int(rng.integers(len(there))))
            kind = Lost if rng.random() < 0.5 else Left
            event = kind(workers=(gone,), cause="<b>&\"it's\x1b gone")  # type: ignore[assignment]
        else:
            event = random_step(rng, there, step, generation)  # type: ignore[assignment]
            step += 1
        actions = random_actions(rng, there, generation, new_roster=not isinstance(event, StepDone))
        generation = max(
            (a.generation for a in actions if isinstance(a, Regroup)), default=generation
        )
        estimated = isinstance(event, StepDone) and rng.random() < 0.3
        estimate = Estimate(100.0, 80.0, 110.0, 0.1, 0.3) if estimated else UNSET
        records.append(Record(at_s=at_s, event=event, actions=actions, estimate=estimate))
    return records


def random_step(
    rng: np.random.Generator, there: Sequence[WorkerId], step: int, generation: int
) -> StepDone:
    """A step with all of its reports, some with gradients and forecasts."""
    compute_s = rng.lognormal(-3, 0.5, len(there)) * rng.choice([1, 30], p=[0.97, 0.03])
    samples = rng.integers(0, 50, len(there))
    has_norms = rng.random() < 0.5
    reports = tuple(
        StepReport(w, n, c, float(compute_s.max() - c), grad_squared_norm=2.0 * has_norms)
        for w, n, c in zip(there, samples.tolist(), compute_s.tolist(), strict=True)
    )
    num = int(rng.integers(0, 4))
    forecasts = [float(x) if x > 0.2 else None for x in rng.random(len(there)) * 500]
    return StepDone(
        step=step,
        generation=generation,
        seconds=float(compute_s.max()) + 0.001,
        reports=reports,
        forecasts=tuple(forecasts) if rng.random() < 0.7 else None,
        grad_squared_norm=1.5 * has_norms,
        quiet=Steps(num=num, seconds=0.05 * num, samples=96 * num),
        position=96 * step,
        idle_s=float(rng.choice([0.0, 0.4])),
    )


def random_actions(
    rng: np.random.Generator, there: Sequence[WorkerId], generation: int, *, new_roster: bool
) -> tuple[AnyAction, ...]:
    """Decisions of every kind."""
    why = "w1 is <slowest> & so on"
    shares = {w: int(n) for w, n in zip(there, rng.integers(0, 50, len(there)), strict=True)}
    if new_roster:
        if not there:
            return (Pause(reason="no worker & <none>"),)
        roster = Regroup(generation=generation + 1, roster=tuple(there), reason=why)
        return roster, Plan(generation=generation + 1, from_step=0, shares=shares, reason=why)
    choices: list[tuple[AnyAction, ...]] = [
        (),
        (Plan(generation=generation, from_step=0, shares=shares, reason=why),),
        (Stay(reason=why),),
        (Launch(num_workers=2, reason=f"replace {there[0]}: {why}"),),
        (Drain(worker=there[0], reason="replaced by w9"),),
    ]
    return choices[int(rng.choice(5, p=[0.6, 0.25, 0.05, 0.05, 0.05]))]


def write_journal(path: Path, records: Sequence[Record]) -> Path:
    """A journal of these records."""
    with Journal.create(path, SETTINGS, about={"scenario": "<made> & up"}) as journal:
        for record in records:
            journal.write(record)
    return path
