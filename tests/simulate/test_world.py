"""Simulated hardware: curves, slowdowns over time, and noise that is the same for all policies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from evenstep.decide.split import split
from evenstep.simulate.scenario import Scenario
from evenstep.simulate.world import World
from evenstep.strict import build


def world(*workers: dict[str, Any], seed: int = 0) -> World:
    data = {"steps": 1, "seed": seed, "settings": {"batch": {"size": 8}}, "workers": workers}
    return World(build(Scenario, data))


def slow_at(made: World, *times_s: float) -> list[float]:
    return [round(float(made.slowdown(t)[0][0]), 9) for t in times_s]


def changing(**change: Any) -> World:
    return world({"fixed_s": 1, "changes": [change]})


def test_a_slowdown_lasts_from_its_start_to_its_end() -> None:
    made = changing(factor=2, at_s=5, until_s=8)
    assert slow_at(made, 0, 4.999, 5, 7.999, 8, 100) == [1, 1, 2, 2, 1, 1]


def test_a_slowdown_without_an_end_stays() -> None:
    assert slow_at(changing(factor=3, at_s=5), 4, 5, 1e9) == [1, 3, 3]


def test_a_periodic_slowdown_repeats() -> None:
    made = changing(factor=2, at_s=5, until_s=6, every_s=10)
    assert slow_at(made, 0, 5, 5.5, 6, 14.9, 15, 15.9, 16, 105.5) == [1, 2, 2, 1, 1, 2, 2, 1, 2]


def test_a_ramp_grows_to_the_factor_and_stays() -> None:
    made = changing(factor=3, at_s=10, ramp_s=20)
    assert slow_at(made, 10, 20, 30, 40) == [1, 2, 3, 3]


def test_simultaneous_slowdowns_multiply_and_stagger_shifts_them() -> None:
    changes = [{"factor": 2, "at_s": 1}, {"factor": 1.5, "at_s": 2, "announced": True}]
    made = world({"fixed_s": 1, "count": 2, "stagger_s": 10, "changes": changes})
    total, announced = made.slowdown(5)
    assert total.tolist() == [3, 1]
    assert announced.tolist() == [1.5, 1]
    assert made.slowdown(20)[0].tolist() == [3, 3]


def test_free_cpu_shows_only_announced_slowdowns() -> None:
    changes = [{"factor": 2}, {"factor": 4, "announced": True}]
    assert world({"fixed_s": 1, "changes": changes}).free_cpu(0, 0).tolist() == [0.25]


def test_free_cpu_stays_between_0_and_1() -> None:
    free = world({"fixed_s": 1, "count": 200, "free_cpu_noise": 0.8}).free_cpu(0, 3)
    assert free.min() == 0
    assert free.max() == 1
    assert len(set(free.tolist())) > 50


def test_noise_depends_on_seed_step_and_slot() -> None:
    group = {"fixed_s": 1, "jitter": 0.1}
    few, many = world({**group, "count": 3}), world({**group, "count": 5})
    assert few.jitter(4).tolist() == many.jitter(4)[:3].tolist()
    assert few.jitter(4).tolist() != few.jitter(5).tolist()
    assert few.jitter(4).tolist() != world({**group, "count": 3}, seed=1).jitter(4).tolist()


def test_jitter_has_mean_one_and_the_given_deviation() -> None:
    draws = world({"fixed_s": 1, "count": 20_000, "jitter": 0.1}).jitter(0)
    assert draws.mean() == pytest.approx(1.0, abs=0.003)
    assert draws.std() == pytest.approx(0.1, abs=0.003)


def test_outside_a_throughput_table_time_is_flat_below_and_throughput_above() -> None:
    made = world({"throughput": {64: 64, 128: 96, 256: 128}})
    curves = made.curves(np.array([0]), np.array([2.0]), 1024)
    times = [float(curves.seconds(np.array([b]))[0]) for b in (0, 1, 64, 96, 128, 256, 512)]
    assert times == pytest.approx([0, 2 * 1, 2 * 1, 2 * 96 / 80, 2 * 128 / 96, 2 * 2, 2 * 4])


def test_tables_and_lines_are_split_together() -> None:
    made = world(
        {"throughput": {64: 64, 128: 96, 256: 128}, "count": 2},
        {"fixed_s": 0.1, "per_sample_s": 0.01, "cap": 60},
    )
    places, upper = np.arange(3), np.array([300, 300, 60])
    curves = made.curves(places, np.ones(3), 300)
    shares = split(curves, 300, np.zeros(3, dtype=np.int64), upper)
    assert shares.tolist() == [120, 120, 60]


def test_ids_sort_in_the_order_of_slots() -> None:
    made = world({"kind": "b", "fixed_s": 1, "count": 11}, {"kind": "b", "fixed_s": 1})
    assert made.names == sorted(made.names)
    assert made.names[-1] == "b-11"
    assert made.worker(0, 1).id == "b-00"
    assert made.worker(0, 2).id == "b-00.2"


def test_a_worker_that_warms_up_reports_its_speed() -> None:
    made = world({"fixed_s": 0.5, "per_sample_s": 0.05, "warmup_share": 10})
    assert made.worker(0, 1).warmup_samples_per_s == pytest.approx(10.0)
