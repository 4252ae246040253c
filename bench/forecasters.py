"""Accuracy and speed of the forecasters: `python -m bench.forecasters`.

Errors are root mean squares over 64 workers and all but the first of 300 steps, in per cent of each
worker's mean speed; a worker's first interference, which no forecaster can foresee, counts too.
Times are wall-clock times of one `learn` and one `forecast` for 1,000 workers.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from evenstep.ports import Forecaster
from evenstep.predict import FORECASTERS, Gated
from evenstep.testing import Series, constant, forecasts, interference
from evenstep.types import FloatArray

STEPS, WORKERS, SEED = 300, 64, 2
TIMED_WORKERS, TIMED_STEPS = 1000, 200


def scenarios() -> dict[str, Series]:
    """Speed series by name; all but two with 3 % noise."""
    sizes: dict[str, Any] = {"steps": STEPS, "workers": WORKERS, "seed": SEED}
    steady, still = constant(**sizes, noise=0.03)
    late, outlook = interference(**sizes)
    walk = np.random.default_rng(SEED).standard_normal(steady.shape).cumsum(axis=0)
    free = outlook[..., 0]
    return {
        "interference, noise 2 %": interference(**sizes, noise=0.02),
        "interference, noise 4 %": interference(**sizes, noise=0.04),
        "interference, felt one step late": (late[:-1], outlook[1:]),
        "interference, speed flat above 60 % CPU": (steady * np.minimum(1, free / 0.6), outlook),
        "interference that free CPU does not show": interference(**sizes, announced=False),
        "free CPU switches, speed does not": (steady, outlook),
        "random walk, 2 % a step": (steady * np.exp(0.02 * walk), still),
        "constant, noise 3 %": (steady, still),
        "constant, noise 0.1 %": constant(**sizes, noise=0.001),
        "constant": constant(**sizes),
    }


def error_percent(forecaster: Forecaster, series: Series) -> float:
    """Root mean squared error from the second step on, in per cent of the mean speed."""
    forecaster.set_roster([f"w{i}" for i in range(WORKERS)])
    speed = series[0]
    miss = (forecasts(forecaster, series)[1:] - speed[1:]) / speed.mean(axis=0)
    return 100 * float(np.sqrt(np.mean(miss**2)))


def milliseconds(forecaster: Forecaster) -> FloatArray:
    """Milliseconds of each step after the first."""
    forecaster.set_roster([f"w{i}" for i in range(TIMED_WORKERS)])
    series = interference(steps=TIMED_STEPS, workers=TIMED_WORKERS, seed=SEED)
    taken = []
    for speed, outlook in zip(*series, strict=True):
        start = perf_counter()
        forecaster.learn(speed, outlook)
        forecaster.forecast(outlook)
        taken.append(1000 * (perf_counter() - start))
    return np.array(taken[1:])


def row(name: str, cells: list[str]) -> None:
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print both tables as Markdown."""
    made: dict[str, Callable[[], Forecaster]] = dict(FORECASTERS)
    gated: dict[str, Callable[[], Forecaster]] = {
        f"{name}, gated": lambda kind=kind: Gated(inner=kind())  # type: ignore[misc]
        for name, kind in FORECASTERS.items()
        if name != "last"
    }
    for group in (made, {"last": FORECASTERS["last"]} | gated):
        row("error, %", list(group))
        row("---", ["---:"] * len(group))
        for name, series in scenarios().items():
            row(name, [f"{error_percent(make(), series):.2f}" for make in group.values()])
        print()
    everyone = made | gated
    row("ms for 1,000 workers", ["median", "95th percentile", "worst of 199"])
    row("---", ["---:"] * 3)
    for name, make in everyone.items():
        taken = milliseconds(make())
        figures = (np.median(taken), np.percentile(taken, 95), taken.max())
        row(name, [f"{figure:.2f}" for figure in figures])


if __name__ == "__main__":
    main()
