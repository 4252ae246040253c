"""The search for the cluster size, its first heuristic, and the kinds of worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import ceil

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evenstep.config import ScalingSettings, WorkerSettings
from evenstep.decide.scaling import HEURISTICS
from evenstep.decide.scaling.efficiency import Efficiency, efficiency
from evenstep.decide.scaling.kind import Kind, kind_to_add, kinds_of, workers_to_drop
from evenstep.decide.scaling.search import (
    LASTING_LOOKS,
    LASTING_S,
    JobProgress,
    Search,
    Size,
    look,
    observe,
    transition,
)
from evenstep.errors import ConfigError
from evenstep.ports import ScalingHeuristic, look_up
from evenstep.strict import build
from evenstep.types import Worker
from tests.hypothesis_examples import examples

Curve = Callable[[int], float]

PAPER = ScalingSettings()
PAPER_WORKERS = WorkerSettings(min=4, max=60)
JOB = JobProgress(elapsed_s=0.0, samples_left=0, initial_samples_per_s=1.0, initial_total_s=0.0)


def size(num_workers: int, samples_per_s: float, num_steps: int = 100) -> Size:
    return Size(
        num_workers=num_workers,
        samples=64 * num_steps,
        seconds=64 * num_steps / samples_per_s,
        price_per_s=float(num_workers),
        batch=64,
        num_steps=num_steps,
    )


def step(num_workers: int, seconds: float, price_per_s: float = 1.0) -> Size:
    """One step with a batch of 64."""
    return Size(
        num_workers=num_workers, samples=64, seconds=seconds, price_per_s=price_per_s, batch=64
    )


def steps(
    memory: Search, num_workers: int, samples_per_s: float, count: int, *, waiting: bool = False
) -> Search:
    for _ in range(count):
        memory = observe(memory, step(num_workers, 64 / samples_per_s), waiting=waiting)
    return memory


def ask(
    memory: Search,
    scaling: ScalingSettings = PAPER,
    workers: WorkerSettings = PAPER_WORKERS,
    *,
    waiting: bool = False,
) -> tuple[Search, int | None, str]:
    return look(memory, scaling, workers, Efficiency(), samples_left=0, waiting=waiting)


class Run:
    """A cluster that follows the search at once, on a noise-free throughput curve."""

    def __init__(
        self,
        curve: Curve,
        start: int,
        scaling: ScalingSettings = PAPER,
        workers: WorkerSettings = PAPER_WORKERS,
        heuristic: ScalingHeuristic | None = None,
    ) -> None:
        self.memory, self.num_workers = Search(), start
        self.path, self.stayed, self.reasons = [start], [0], [""]
        grid = (workers.max - workers.min) // scaling.step_workers + 3
        for _ in range(3 * grid * (scaling.settle_steps + 2 * scaling.period_steps + 1)):
            self.memory = observe(self.memory, step(self.num_workers, 64 / curve(self.num_workers)))
            self.stayed[-1] += 1
            self.memory, target, reason = look(
                self.memory,
                scaling,
                workers,
                heuristic or Efficiency(),
                samples_left=0,
                waiting=False,
            )
            if target is not None:
                assert workers.min <= target <= workers.max
                self.num_workers = target
                self.memory = transition(self.memory, target)
                self.path.append(target)
                self.stayed.append(0)
                self.reasons.append(reason)
            elif self.memory.is_settled:
                self.reasons.append(reason)
                return
        raise AssertionError(f"not settled: {self.path}")


def amdahl(fixed: float, overhead: float = 0.0) -> Curve:
    """k / (1 + fixed k + overhead k^2): the efficiency of pairs falls with k, for any d."""
    return lambda k: 100 * k / (1 + fixed * k + overhead * k * k)


# The first heuristic


def test_the_slides_example_has_efficiency_four_fifths() -> None:
    assert efficiency(size(4, 400.0), size(5, 480.0)) == pytest.approx(0.8)
    passed, reason = Efficiency(threshold=0.5).worth(size(4, 400.0), size(5, 480.0), JOB)
    assert (passed, reason) == (True, "efficiency 0.80 > 0.50")


def test_an_efficiency_at_the_threshold_does_not_pass() -> None:
    passed, reason = Efficiency(threshold=0.5).worth(size(4, 400.0), size(8, 600.0), JOB)
    assert (passed, reason) == (False, "efficiency 0.50 <= 0.50")


def test_perfect_no_and_harmful_scaling_are_one_zero_and_negative() -> None:
    assert efficiency(size(4, 400.0), size(8, 800.0)) == pytest.approx(1.0)
    assert efficiency(size(4, 400.0), size(8, 400.0)) == 0.0
    assert efficiency(size(4, 400.0), size(8, 300.0)) < 0.0


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_a_threshold_outside_0_to_1_is_refused(threshold: float) -> None:
    with pytest.raises(ConfigError, match="threshold: must lie in"):
        Efficiency(threshold=threshold)


def test_heuristics_are_found_and_set_by_name() -> None:
    plug: ScalingHeuristic = build(
        look_up("heuristic", "efficiency", HEURISTICS), {"threshold": 0.3}
    )
    assert plug == Efficiency(threshold=0.3)


# The search


def test_the_paths_of_the_papers_defaults() -> None:
    # Efficiency of (k, k + 4) is 1 / (1 + (k + 4) / 2): 0.20, 0.14, 0.11, then 0.09.
    up = Run(amdahl(0.5), start=4)
    assert up.path == [4, 8, 12, 16, 20, 16]
    # Ten steps and a discarded one at each size, 100 at the size that fails, then 16 fills up.
    assert up.stayed == [11, 11, 11, 11, 101, 91]
    assert up.reasons == [
        "",
        "only 4 workers measured; try 8",
        "4 -> 8 workers: efficiency 0.20 > 0.10; try 12",
        "8 -> 12 workers: efficiency 0.14 > 0.10; try 16",
        "12 -> 16 workers: efficiency 0.11 > 0.10; try 20",
        "16 -> 20 workers: efficiency 0.09 <= 0.10; settle at 16",
        "16 -> 20 workers: efficiency 0.09 <= 0.10; settle at 16",
    ]

    down = Run(amdahl(0.5), start=20)
    assert down.path == [20, 24, 16, 12, 8, 4, 20, 16]
    assert down.reasons[2] == (
        "20 -> 24 workers: efficiency 0.08 <= 0.10; the lowest 3 pairs do not all pass; try 16"
    )
    assert down.reasons[6] == (
        "16 -> 20 workers: efficiency 0.09 <= 0.10; "
        "20 workers have 10 of 100 steps; measure more at 20"
    )


def test_three_passing_pairs_end_the_search_for_smaller_sizes() -> None:
    # First fail at (40, 44): from 40 it tries smaller sizes down to 28, three passing pairs.
    assert Run(amdahl(0.21), start=40).path == [40, 44, 36, 32, 28, 44, 40]


def test_perfect_scaling_ends_at_the_maximum() -> None:
    run = Run(lambda k: 100.0 * k, start=50)
    assert run.path == [50, 54, 58, 60]
    assert run.reasons[-1] == (
        "58 -> 60 workers: efficiency 1.00 > 0.10; 60 is the maximum; settle at 60"
    )


def test_without_any_scaling_it_ends_at_the_minimum_even_off_the_grid() -> None:
    assert Run(lambda k: 100.0, start=10).path == [10, 14, 6, 4, 6, 4]


def test_fewer_than_three_pairs_are_not_three_passes() -> None:
    assert Run(lambda k: 100.0 * k, start=56).path == [56, 60, 52, 48, 60]


def test_a_size_above_the_maximum_is_left_for_the_maximum() -> None:
    memory = steps(steps(Search(), 4, 100.0, 11), 8, 200.0, 11)  # an operator requested 8
    _, target, reason = ask(memory, workers=WorkerSettings(min=4, max=6))
    assert target == 6
    assert reason.endswith("6 is the maximum; settle at 6")


def test_at_the_maximum_the_first_move_is_down() -> None:
    assert Run(amdahl(0.5), start=60).path[:2] == [60, 56]


def test_a_search_with_one_allowed_size_stays_there() -> None:
    only = WorkerSettings(min=4, max=4)
    _, target, reason = ask(steps(Search(), 4, 100.0, 11), workers=only)
    assert (target, reason) == (None, "minimum and maximum are equal; stay at 4")


@st.composite
def _bounds(draw: st.DrawFn) -> tuple[WorkerSettings, ScalingSettings, int]:
    least = draw(st.integers(1, 12))
    most = least + draw(st.integers(0, 40))
    scaling = ScalingSettings(
        period_steps=draw(st.integers(1, 4)),
        step_workers=draw(st.integers(1, 9)),
        passes=draw(st.integers(1, 4)),
        settle_steps=draw(st.integers(1, 12)),
    )
    return WorkerSettings(min=least, max=most), scaling, draw(st.integers(least, most))


bounds = _bounds()


def first_fail(sizes: list[int], curve: Curve) -> int:
    """Brute force: the lower size of the first pair that fails, or the largest size."""
    for a, b in pairwise(sizes):
        close = abs(efficiency(size(a, curve(a)), size(b, curve(b))) - Efficiency().threshold)
        assume(close > 1e-9)  # else the last bit of a sum decides
        if not Efficiency().worth(size(a, curve(a)), size(b, curve(b)), JOB)[0]:
            return a
    return sizes[-1]


@given(bounds, st.floats(0.0, 3.0), st.floats(0.0, 0.05))
def test_it_ends_within_a_step_of_the_best_size_from_anywhere(
    bound: tuple[WorkerSettings, ScalingSettings, int], fixed: float, overhead: float
) -> None:
    workers, scaling, start = bound
    curve, d = amdahl(fixed, overhead), scaling.step_workers
    best = next(
        (
            k
            for k in range(workers.min, workers.max)
            if not Efficiency().worth(size(k, curve(k)), size(k + d, curve(k + d)), JOB)[0]
        ),
        workers.max,
    )
    assert abs(Run(curve, start, scaling, workers).path[-1] - best) <= d


@st.composite
def _concave(draw: st.DrawFn) -> Curve:
    """Any concave curve that is above zero up to 60 workers."""
    gains = sorted(draw(st.lists(st.floats(-1.0, 10.0), min_size=60, max_size=60)), reverse=True)
    curve = np.cumsum([max(gains[0], 1.0), *gains])
    lift = max(0.0, 1.0 - float(curve.min()))
    return lambda k: float(curve[k]) + lift


concave = _concave()


@given(bounds, concave)
@examples(200)
def test_from_the_minimum_it_ends_at_the_first_size_not_worth_leaving(
    bound: tuple[WorkerSettings, ScalingSettings, int], curve: Curve
) -> None:
    workers, scaling, _ = bound
    grid = [*range(workers.min, workers.max, scaling.step_workers), workers.max]
    assert Run(curve, workers.min, scaling, workers).path[-1] == first_fail(grid, curve)


@given(bounds, concave)
@examples(200)
def test_on_any_concave_curve_it_ends_where_less_is_worse_and_more_not_worth_it(
    bound: tuple[WorkerSettings, ScalingSettings, int], curve: Curve
) -> None:
    # Efficiency need not fall along a concave curve, so it may end at a local optimum.
    workers, scaling, start = bound
    run = Run(curve, start, scaling, workers)
    seen = sorted(set(run.path))
    assert run.path[-1] == first_fail(seen, curve)
    if run.path[-1] == seen[-1]:
        assert seen[-1] == workers.max
    assert run.path == Run(curve, start, scaling, workers).path


@given(
    bounds,
    st.lists(st.tuples(st.floats(1e-3, 1e6), st.integers(-3, 3)), min_size=1, max_size=60),
)
def test_no_measurement_and_no_loss_drives_it_out_of_bounds(
    bound: tuple[WorkerSettings, ScalingSettings, int], steps: list[tuple[float, int]]
) -> None:
    workers, scaling, num_workers = bound
    memory = Search()
    for seconds, wobble in steps:
        memory = observe(memory, step(num_workers, seconds))
        memory, target, reason = ask(memory, scaling, workers)
        assert target is None or (reason and workers.min <= target <= workers.max)
        assert target != num_workers
        num_workers = max(1, (target or num_workers) + wobble)  # or an unordered change


def test_the_first_step_after_a_transition_is_time_but_not_throughput() -> None:
    memory = observe(Search(), step(4, 100.0))
    assert (memory.sizes, memory.elapsed_s) == ((), 100.0)
    memory = transition(observe(memory, step(4, 1.0)), 4)  # one worker replaced by another
    memory = observe(memory, step(4, 50.0))
    assert [(s.samples_per_s, s.num_steps) for s in memory.sizes] == [(64.0, 1)]


def test_a_size_is_remembered_by_all_its_samples_and_seconds() -> None:
    memory = observe(Search(), step(4, 9.0))
    for seconds in (1.0, 2.0, 4.0):
        memory = observe(memory, step(4, seconds, price_per_s=seconds))
    (known,) = memory.sizes
    assert known.samples_per_s == pytest.approx(3 * 64 / 7)
    assert known.price_per_s == pytest.approx((1 + 4 + 16) / 7)


def test_single_and_summed_reports_are_equivalent() -> None:
    singly, summed = (
        Search(is_first_step=False, num_workers=4),
        Search(is_first_step=False, num_workers=4),
    )
    for seconds in (1.0, 1.0, 5.0, 1.0):
        singly = observe(singly, step(4, seconds))
    summed = observe(summed, replace(step(4, 8.0), samples=4 * 64, num_steps=4))
    assert singly == summed


def test_steps_slowed_by_starting_workers_do_not_count_for_the_size() -> None:
    memory = steps(Search(), 4, 100.0, 11)
    slowed = steps(memory, 4, 90.0, 50, waiting=True)
    assert (slowed.sizes, slowed.recent) == (memory.sizes, memory.recent)
    assert slowed.elapsed_s == pytest.approx(memory.elapsed_s + 50 * 64 / 90)
    (usual,) = steps(memory, 4, 98.0, 50, waiting=True).sizes
    assert usual.num_steps == 60


def test_it_looks_every_period_and_never_while_waiting() -> None:
    memory, looks = Search(), []
    for number in range(33):
        memory = observe(memory, step(4, 1.0))
        assert ask(memory, waiting=True) == (memory, None, "")
        memory, _, why = ask(memory)
        if why:
            looks.append(number)
    assert looks == [10, 20, 30]


def test_what_was_learned_survives_a_loss() -> None:
    run = Run(amdahl(0.5), start=4)  # settled at 16
    memory = steps(run.memory, 15, amdahl(0.5)(15), 11)
    _, target, reason = ask(memory)
    assert target == 16
    assert reason == "16 -> 20 workers: efficiency 0.09 <= 0.10; settle at 16"


def test_a_briefly_measured_size_is_not_a_data_point() -> None:
    memory = steps(Search(), 4, 100.0, 11)
    memory = steps(memory, 5, 1.0, 4)  # the first of four joiners, measured for three steps
    memory = steps(memory, 8, 180.0, 11)
    assert ask(memory)[1:] == (12, "4 -> 8 workers: efficiency 0.80 > 0.10; try 12")


def test_losses_do_not_pull_it_down_one_by_one() -> None:
    """A size close to one with more data is not a data point: its noise would decide."""
    run = Run(amdahl(0.5), start=4)  # settled at 16
    memory = steps(run.memory, 15, amdahl(0.5)(16) * 1.02, 40)  # by chance better than 16
    _, target, reason = ask(memory)
    assert (target, reason[-12:]) == (16, "settle at 16")


def test_a_bound_is_a_data_point_even_if_close_to_another() -> None:
    assert Run(lambda k: 100.0 * k, start=50).path == [50, 54, 58, 60]


def settled() -> Search:
    memory = Run(amdahl(0.5), start=4).memory
    assert memory.is_settled
    assert memory.num_workers == 16
    return memory


def test_a_permanent_shift_restarts_the_search() -> None:
    memory, rate = settled(), amdahl(0.5)(16)
    look_s = 10 * 64 / (rate * 0.7)
    looks = ceil(LASTING_S / look_s)
    assert looks > LASTING_LOOKS
    for _ in range(looks - 1):
        memory, target, _ = ask(steps(memory, 16, rate * 0.7, 10))
        assert target is None
    memory, target, reason = ask(steps(memory, 16, rate * 0.7, 10))
    assert target == 20
    assert reason == (
        f"16 workers went from 177.8 to 124.4 samples/s (-30%) for {looks} looks; "
        "restart the search: only 16 workers measured; try 20"
    )
    assert [(s.num_workers, s.num_steps) for s in memory.sizes] == [(16, 10 * looks)]


@pytest.mark.parametrize("factor", [0.85, 1.15])
def test_a_small_shift_is_ignored(factor: float) -> None:
    memory, rate = settled(), amdahl(0.5)(16)
    for _ in range(50):
        memory, target, reason = ask(steps(memory, 16, rate * factor, 10))
        assert target is None
        assert reason.endswith("settle at 16")


def test_a_temporary_slowdown_does_not_restart_the_search() -> None:
    memory, rate = settled(), amdahl(0.5)(16)
    for _ in range(10):
        memory, _, _ = ask(steps(memory, 16, rate * 0.5, 10))
        memory, _, _ = ask(steps(memory, 16, rate * 0.5, 10))
        memory, target, _ = ask(steps(memory, 16, rate, 10))
        assert target is None
        assert len(memory.sizes) == 5


def test_a_look_does_not_modify_its_state_in_place() -> None:
    memory = steps(Search(), 4, 100.0, 11)
    before = replace(memory)
    ask(memory)
    observe(memory, step(4, 1.0))
    transition(memory, 8)
    assert memory == before


def test_noise_of_five_per_cent_leaves_it_within_a_step_of_the_best() -> None:
    # The best is 16; by the clean figures (12, 16) and (16, 20) pass and fail by a tenth each.
    rng, curve = np.random.default_rng(7), amdahl(0.5)
    ends = []
    for _ in range(40):
        noise: Curve = lambda k: curve(k) * float(np.exp(rng.normal(0, 0.05)))  # noqa: E731
        ends.append(Run(noise, start=4).path[-1])
    assert np.mean([12 <= end <= 20 for end in ends]) >= 0.9


# Kinds


FAST = Kind(name="fast", samples_per_s=100.0, price_per_hour=4.0)
SLOW = Kind(name="slow", samples_per_s=40.0, price_per_hour=1.0)
FREE = Kind(name="free", samples_per_s=1.0, price_per_hour=0.0)


def test_the_kind_with_the_most_samples_per_price_is_added() -> None:
    assert kind_to_add([FAST, SLOW]) == (
        "slow",
        "slow trains 1.44e+05 samples per unit of price: the best of 2 kinds",
    )
    assert kind_to_add([FAST, SLOW, FREE])[0] == "free"
    assert kind_to_add([]) == ("", "no kind measured yet: any kind")
    assert kind_to_add([replace(SLOW, name="b"), replace(SLOW, name="a")])[0] == "a"


def roster(*kinds: str) -> list[Worker]:
    return [Worker(id=f"w{rank}", kind=kind) for rank, kind in enumerate(kinds)]


def test_with_one_kind_the_tail_of_the_roster_is_dropped() -> None:
    assert workers_to_drop(roster("slow", "slow", "slow"), {"slow": SLOW}, 1)[0] == ("w2",)
    assert workers_to_drop(roster("slow", "slow"), {}, 1) == (("w1",), "last in rank")


def test_the_worst_value_is_dropped_first_but_never_the_leader() -> None:
    kinds = {"fast": FAST, "slow": SLOW}
    mixed = roster("fast", "slow", "fast", "slow")
    ids, reason = workers_to_drop(mixed, kinds, 2)
    assert ids == ("w2", "w3")
    assert reason.startswith("fast trains 9e+04 samples per unit of price; slow trains")
    assert workers_to_drop(mixed, kinds, 9)[0] == ("w2", "w3", "w1")


def test_the_kinds_of_a_roster_are_means_over_measured_workers() -> None:
    workers = [
        Worker(id="a", kind="x", price_per_hour=2.0),
        Worker(id="b", kind="x", price_per_hour=4.0),
        Worker(id="c", kind="y"),
    ]
    assert kinds_of(workers, {"a": 10.0, "b": 20.0}) == {
        "x": Kind(name="x", samples_per_s=15.0, price_per_hour=3.0)
    }
