"""Time of the brain: a thousand workers for a thousand steps, and one split of ten thousand.

Run `python -m bench.simulate`.
"""

from __future__ import annotations

import platform
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from evenstep.config import Choice
from evenstep.decide.curves import FlatLinear
from evenstep.decide.split import split
from evenstep.simulate.run import LIMIT, run
from evenstep.simulate.scenario import load_scenario

THOUSAND = Path(__file__).parents[1] / "scenarios" / "thousand.yaml"


def simulated(policy: Choice) -> str:
    """Time of the whole simulated run of `thousand`, simulator and brain."""
    scenario = load_scenario(THOUSAND)
    start = perf_counter()
    result = run(scenario, policy)
    took_s = perf_counter() - start
    return f"{took_s:6.2f} s, {took_s / result.num_steps * 1000:5.2f} ms per step"


def solved(num_workers: int = 10_000, times: int = 9) -> str:
    """Time of a min-max split over uneven lines with knees and caps."""
    rng = np.random.default_rng(0)
    curves = FlatLinear(
        floor_s=rng.uniform(0.0, 0.2, num_workers),
        fixed_s=rng.uniform(0.0, 0.1, num_workers),
        per_sample_s=rng.uniform(0.0005, 0.01, num_workers),
    )
    upper = rng.integers(50, 500, num_workers)
    took_s = []
    for _ in range(times):
        start = perf_counter()
        split(curves, 32 * num_workers, np.zeros_like(upper), upper)
        took_s.append(perf_counter() - start)
    return f"{median(took_s) * 1000:6.2f} ms (median of {times})"


if __name__ == "__main__":
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}")
    print(f"1,000 workers x 1,000 steps, limit:    {simulated(LIMIT)}")
    print(f"1,000 workers x 1,000 steps, uniform:  {simulated(Choice('uniform'))}")
    print(f"1,000 workers x 1,000 steps, auto:     {simulated(Choice('auto'))}")
    print(f"split of 10,000 workers:               {solved()}")
