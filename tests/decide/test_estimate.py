"""The limit and the throughput of equal shares, against trying all shares."""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.config import BatchSettings, Choice, Settings
from evenstep.decide.curves import FlatLinear
from evenstep.decide.estimate import StepMeans, compare, guessed_curves
from evenstep.decide.machine import decide
from evenstep.engine import assemble
from evenstep.types import Fleet, Joined, StepDone, StepReport, Worker

BATCH = 12


def fleet_of(num: int, cap: int | None = None) -> Fleet:
    return Fleet.of([Worker(id=f"w{i}", cap=cap) for i in range(num)], batch=BATCH)


costs = st.floats(0.001, 1.0)


@given(
    fixed=st.lists(costs, min_size=3, max_size=3),
    each=st.lists(costs, min_size=3, max_size=3),
    cut=st.lists(st.integers(0, BATCH), min_size=2, max_size=2).map(sorted),
    beyond_s=st.floats(0.0, 1.0),
)
def test_the_limit_is_the_best_of_all_shares(
    fixed: list[float], each: list[float], cut: list[int], beyond_s: float
) -> None:
    curves = FlatLinear(floor_s=np.zeros(3), fixed_s=np.array(fixed), per_sample_s=np.array(each))
    shares = [cut[0], cut[1] - cut[0], BATCH - cut[1]]
    compute_s = curves.seconds(np.array(shares)).tolist()
    fleet, slowest_s = fleet_of(3), max(compute_s)
    found = compare(curves, fleet, np.array(shares), np.array(compute_s), slowest_s + beyond_s)
    assert found is not None
    best_s = inf
    for first, second in product(range(BATCH + 1), repeat=2):
        if first + second <= BATCH:
            tried = np.array([first, second, BATCH - first - second])
            best_s = min(best_s, float(curves.seconds(tried).max()))
    equal_s = float(curves.seconds(np.array([4, 4, 4])).max())
    assert found.limit == pytest.approx(BATCH / (best_s + beyond_s))
    assert found.equal == pytest.approx(BATCH / (equal_s + beyond_s))
    assert found.measured == pytest.approx(BATCH / (slowest_s + beyond_s))
    assert found.part_of_limit <= 1.0
    assert 0.0 <= found.wait_fraction < 1.0


def test_waiting_is_the_rest_of_the_slowest_workers_time() -> None:
    fleet = fleet_of(3)
    shares, compute_s = np.array([4, 4, 4]), np.array([1.0, 2.0, 4.0])
    found = compare(guessed_curves(shares, compute_s), fleet, shares, compute_s, 4.0)
    assert found is not None
    assert found.wait_fraction == found.equal_wait_fraction == pytest.approx(5 / 12)
    assert found.speedup == 1.0


def test_caps_bound_the_limit() -> None:
    fleet = fleet_of(2, cap=6)
    shares, compute_s = np.array([6, 6]), np.array([1.0, 3.0])
    found = compare(guessed_curves(shares, compute_s), fleet, shares, compute_s, 3.0)
    assert found is not None
    assert found.part_of_limit == 1.0


@pytest.mark.parametrize("policy", ["auto", "curve", "uniform", "proportional"])
def test_every_policy_has_an_estimate(policy: str) -> None:
    """Curves of its own, or those of the last step."""
    settings = Settings(batch=BatchSettings(size=BATCH), policy=Choice(policy))
    workers = tuple(Worker(id=f"w{i}") for i in range(2))
    cluster, _ = decide(assemble(settings), Joined(workers=workers))
    means, found = StepMeans(), None
    for number in range(20):
        shares = cluster.shares
        reports = tuple(
            StepReport(w, n, 0.1 * n * (1 + i)) for i, (w, n) in enumerate(shares.items())
        )
        slowest_s = max(r.compute_s for r in reports)
        event = StepDone(step=number, generation=1, seconds=slowest_s, reports=reports)
        cluster, _ = decide(cluster, event)
        means.add(event)
        found = means.estimate(cluster)
    assert found is not None
    assert found.limit == pytest.approx(12 / 0.8, rel=0.1)
    assert found.equal == pytest.approx(12 / 1.2, rel=0.1)


def test_without_a_fleet_there_is_no_estimate() -> None:
    cluster = assemble(Settings(batch=BatchSettings(size=BATCH)))
    means = StepMeans()
    assert means.estimate(cluster) is None
    means.add(StepDone(step=0, generation=1, seconds=1.0, reports=()))
    assert means.estimate(cluster) is None


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=30))
def test_noise_counts_alike_for_all_shares(noise: list[float]) -> None:
    """Equal shares are as fast as equal shares, whatever the curves say of their level."""
    settings = Settings(batch=BatchSettings(size=BATCH), policy=Choice("auto"))
    workers = tuple(Worker(id=f"w{i}") for i in range(2))
    cluster, _ = decide(assemble(settings), Joined(workers=workers))
    means = StepMeans()
    for number, factor in enumerate(noise):
        reports = (StepReport("w0", 6, 0.6 * factor), StepReport("w1", 6, 0.7 / factor))
        seconds = max(r.compute_s for r in reports) + 0.1
        event = StepDone(step=number, generation=1, seconds=seconds, reports=reports)
        cluster, _ = decide(cluster, event)
        means.add(event)
    found = means.estimate(cluster)
    assert found is not None
    assert found.speedup == pytest.approx(1.0)
    assert found.part_of_limit <= 1.0
