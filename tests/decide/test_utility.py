"""Utility against cost: the shapes, the condition, and invalid settings."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from evenstep.config import ScalingSettings, WorkerSettings
from evenstep.decide.scaling.search import JobProgress, Search, Size, look, observe
from evenstep.decide.scaling.utility import Utility, value_at
from evenstep.errors import ConfigError
from evenstep.ports import ScalingHeuristic
from evenstep.strict import build


def size(num_workers: int, samples_per_s: float, price_per_s: float) -> Size:
    return Size(
        num_workers=num_workers,
        samples=64,
        seconds=64 / samples_per_s,
        price_per_s=price_per_s,
        batch=64,
    )


def job(elapsed_s: float, samples_left: int, initial_total_s: float = 0.0) -> JobProgress:
    return JobProgress(
        elapsed_s=elapsed_s,
        samples_left=samples_left,
        initial_samples_per_s=1.0,
        initial_total_s=initial_total_s,
    )


def value(utility: Utility, total_s: float, initial_total_s: float = 0.0) -> float:
    return value_at(utility.points(initial_total_s=initial_total_s), total_s)


def test_a_linear_utility_falls_to_zero_and_below() -> None:
    plug = Utility(linear="100,10800")
    assert [value(plug, t) for t in (0, 5400, 10800, 21600)] == [100, 50, 0, -100]


def test_a_step_utility_holds_then_falls_to_zero_at_the_initial_total() -> None:
    plug = Utility(step="50:100")
    points = [value(plug, t, 300) for t in (0, 99, 100, 200, 300, 500)]
    assert points == [50, 50, 50, 25, 0, -50]


def test_points_of_a_step_utility_are_joined_by_lines() -> None:
    plug = Utility(step="50:0,20:100")
    assert [value(plug, t, 300) for t in (0, 50, 100, 200, 300, 400)] == [50, 35, 20, 10, 0, -10]
    plug = Utility(step="50:10,20:20")
    assert [value(plug, t, 40) for t in (0, 10, 15, 20, 30, 40)] == [50, 50, 35, 20, 10, 0]


def test_an_initial_total_before_the_last_end_adds_no_point() -> None:
    assert [value(Utility(step="50:100"), t, 100) for t in (0, 100, 900)] == [50, 50, 50]
    assert [value(Utility(step="50:0"), t) for t in (0, 900)] == [50, 50]


def test_the_condition_weighs_the_rest_of_the_job() -> None:
    # 100 s more at 4 workers, 60 s at 8; a second is worth 1, four workers cost 1 a second.
    small, large = size(4, 10.0, 1.0), size(8, 1000 / 60, 2.0)
    passed, reason = Utility(linear="1000,1000").worth(small, large, job(500.0, 1000))
    assert passed
    assert reason == "utility +40 > cost +20 (finishes at 560 s instead of 600 s)"
    passed, reason = Utility(linear="400,1000").worth(small, large, job(500.0, 1000))
    assert not passed
    assert reason == "utility +16 <= cost +20 (finishes at 560 s instead of 600 s)"


def test_an_equal_gain_and_cost_do_not_pass() -> None:
    small, large = size(4, 10.0, 1.0), size(8, 20.0, 3.0)  # 100 s for 100, or 50 s for 150
    assert not Utility(linear="1000,1000").worth(small, large, job(0.0, 1000))[0]


def test_a_smaller_cluster_can_be_kept_for_its_price_alone() -> None:
    cheap, dear = size(4, 10.0, 0.1), size(8, 19.0, 10.0)
    assert not Utility(linear="10,10800").worth(cheap, dear, job(0.0, 10_000))[0]
    assert Utility(linear="1000000,10800").worth(cheap, dear, job(0.0, 10_000))[0]


def test_a_deadline_counts_only_if_the_larger_size_alone_meets_it() -> None:
    plug = Utility(step="1000:3600")
    small, large = size(4, 10.0, 0.001), size(8, 19.0, 0.002)
    # Both under an hour: no utility to gain. Then 5000 s against 2632 s, with the hour between.
    assert not plug.worth(small, large, job(0.0, 20_000, 4000.0))[0]
    assert plug.worth(small, large, job(0.0, 50_000, 5000.0))[0]


def test_a_job_without_length_says_so() -> None:
    passed, reason = Utility(linear="1,1").worth(size(4, 1, 1), size(8, 2, 2), job(0.0, 0))
    assert not passed
    assert "set `samples`" in reason


@given(
    st.floats(0.1, 1e6),
    st.floats(1.0, 1e6),
    st.tuples(st.floats(1.0, 1e4), st.floats(1.0, 1e4)),
    st.tuples(st.floats(0.0, 1e2), st.floats(0.0, 1e2)),
)
@example(1.0, 1.0, (1.0, 1.0000000000000002), (0.0, 0.0))  # equal except for rounding
def test_with_a_linear_utility_the_answer_is_independent_of_progress(
    y0: float, x0: float, speeds: tuple[float, float], prices: tuple[float, float]
) -> None:
    small, large = size(4, speeds[0], prices[0]), size(8, speeds[1], prices[1])
    utility = y0 / x0 * (1 / speeds[0] - 1 / speeds[1])
    cost = prices[1] / speeds[1] - prices[0] / speeds[0]
    # Values that differ by rounding alone may be ordered either way.
    worth_s = y0 / x0 * (50.0 + 10_000 / min(speeds))
    spent = 10_000 * (prices[0] / speeds[0] + prices[1] / speeds[1])
    assume(1000 * abs(utility - cost) > 1e-9 * (y0 + worth_s + spent))
    plug = Utility(linear=f"{y0},{x0}")
    for elapsed_s, left in ((0.0, 10_000), (50.0, 1000)):
        assert plug.worth(small, large, job(elapsed_s, left))[0] == (utility > cost)


@given(
    st.lists(st.tuples(st.floats(0, 1e4), st.floats(0.1, 1e4)), min_size=1, max_size=6),
    st.floats(0, 1e5),
    st.floats(0, 1e5),
    st.floats(0, 1e5),
)
def test_no_accepted_utility_rises_with_time(
    rows: list[tuple[float, float]], initial_s: float, a: float, b: float
) -> None:
    end, parts = 0.0, []
    for v, gap in sorted(rows, key=lambda row: -row[0]):
        end += gap
        parts.append(f"{v!r}:{end!r}")
    plug = Utility(step=",".join(parts))
    early, late = sorted((a, b))
    first, last = value(plug, early, initial_s), value(plug, late, initial_s)
    assert last <= first + 1e-9 * (abs(first) + abs(last) + 1)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "give either linear"),
        ({"linear": "1,2", "step": "1:2"}, "give either linear"),
        ({"linear": ""}, "give either linear"),
        ({"linear": "100"}, 'linear: expected "y0,x0", got "100"'),
        ({"linear": 100}, 'linear: expected "y0,x0", got "100"'),
        ({"step": 100.0}, 'step: expected "value:end,value:end", got "100"'),
        ({"linear": "1,2,3"}, 'linear: expected "y0,x0", got "1,2,3"'),
        ({"linear": "a,b"}, 'linear: expected "y0,x0", got "a,b"'),
        ({"linear": "nan,5"}, "linear: numbers must be finite"),
        ({"linear": "5,inf"}, "linear: numbers must be finite"),
        ({"linear": "100,0"}, "linear: x0 must be above 0 s"),
        ({"linear": "-100,10"}, "linear: must not rise"),
        ({"step": "10:100,20:200"}, "step: must not rise: 10, then 20"),
        ({"step": "20:100,10:100"}, "step: ends must increase, got 100 after 100"),
        ({"step": "20:100,10:50"}, "step: ends must increase, got 50 after 100"),
        ({"step": "20:100,"}, "step: expected"),
        ({"step": "20:100:5"}, "step: expected"),
        ({"step": "nan:100"}, "step: numbers must be finite"),
        ({"step": "20:nan"}, "step: numbers must be finite"),
        ({"step": "20:-5"}, "step: ends must not be negative"),
        ({"step": "20:10,-5:20"}, "step: must not rise: -5, then 0"),
    ],
)
def test_an_invalid_utility_is_refused(options: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build(Utility, options)


def test_the_search_passes_the_initial_duration_to_the_utility() -> None:
    """T_initial is measured once, at the first look."""
    jobs: list[JobProgress] = []

    class Spy:
        def worth(self, smaller: Size, larger: Size, job: JobProgress) -> tuple[bool, str]:
            jobs.append(job)
            return False, "no"

    scaling, workers = ScalingSettings(step_workers=4), WorkerSettings(min=4, max=60)
    spy: ScalingHeuristic = Spy()  # type: ignore[assignment]  # our search makes Size and JobProgress
    memory, left = Search(), 100_000
    for num_workers in [4] * 11 + [8] * 11 + [4] * 11:
        memory = observe(memory, size(num_workers, 10.0 * num_workers, 1.0))
        left -= 64
        memory, _, _ = look(memory, scaling, workers, spy, samples_left=left, waiting=False)
    elapsed_s = 11 * 64 / 40
    assert [j.initial_total_s for j in jobs] == pytest.approx(
        [elapsed_s + (100_000 - 11 * 64) / 40] * 2
    )
    assert jobs[0].initial_samples_per_s == pytest.approx(40.0)
    assert jobs[0].elapsed_s == pytest.approx(11 * 64 / 40 + 11 * 64 / 80)
    assert [j.samples_left for j in jobs] == [100_000 - 22 * 64, 100_000 - 33 * 64]
