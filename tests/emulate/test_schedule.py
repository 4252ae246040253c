"""Schedules: levels over time."""

from __future__ import annotations

import math
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.emulate import Schedule, h_level, omnilearn, periodic, steady, step_change


@given(
    num_workers=st.integers(2, 64),
    h=st.floats(1, 100),
    total_cores=st.floats(0.1, 1000),
    cap=st.one_of(st.just(math.inf), st.floats(0.5, 1.5)),
)
def test_the_ratio_of_largest_to_smallest_is_h_and_the_total_is_kept(
    num_workers: int, h: float, total_cores: float, cap: float
) -> None:
    """`cap` is relative to the largest worker's uncapped cores."""
    free = h_level(num_workers, h, total_cores)
    try:
        cores = h_level(num_workers, h, total_cores, max_cores=cap * free[-1])
    except ValueError as e:
        assert cap < 1
        assert "cannot use" in str(e)  # noqa: PT017
        return
    assert max(cores) / min(cores) == pytest.approx(h)
    assert math.fsum(cores) == pytest.approx(total_cores)
    assert list(cores) == pytest.approx(sorted(cores))
    assert max(cores) <= cap * free[-1] * (1 + 1e-9)


def test_the_papers_clusters_of_39_cores_are_reproduced() -> None:
    assert h_level(3, 1, 39) == pytest.approx((13, 13, 13))
    assert h_level(3, 2, 39) == pytest.approx((9, 12, 18), rel=0.05)
    assert h_level(3, 10, 39, max_cores=20) == pytest.approx((2, 17, 20))


def test_a_total_that_the_workers_cannot_use_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"3 workers with 0\.1 to 1 cores.*cannot use 2\.5"):
        h_level(3, 10, 2.5, max_cores=1.0)


def test_omnilearns_published_levels_are_reproduced_and_scale_to_any_cores() -> None:
    schedule = omnilearn(48, stage=10)
    papers = ((12, 12, 12, 12), (12, 12, 8, 16), (9, 9, 6, 24), (6, 6, 4, 32))
    for i, cores in enumerate((*papers, *papers[::-1])):
        assert schedule.at(10 * i) == pytest.approx(cores)
        assert schedule.at(10 * i + 9.99) == pytest.approx(cores)
    assert schedule.at(1e6) == pytest.approx(papers[0])
    small = omnilearn(1.5, stage=10)
    assert small.at(30) == pytest.approx([c * 1.5 / 48 for c in papers[3]])
    assert sum(omnilearn(2, stage=10, num_workers=3).at(10)) == pytest.approx(2)


def test_a_step_change_applies_from_its_start_on() -> None:
    schedule = step_change((1.0, 0.5), (0.5, 1.0), at=20)
    assert schedule.at(-1) == schedule.at(0) == schedule.at(19.9) == (1.0, 0.5)
    assert schedule.at(20) == schedule.at(1e9) == (0.5, 1.0)
    assert list(schedule.changes()) == [(0, (1.0, 0.5)), (20, (0.5, 1.0))]


def test_periodic_interference_repeats() -> None:
    schedule = periodic((1.0,), (0.25,), every=10, lasts=2)
    assert [schedule.at(t)[0] for t in (0, 7, 8, 9, 10, 17, 18)] == [1, 1, 0.25, 0.25, 1, 1, 0.25]
    changes = list(islice(schedule.changes(), 5))
    assert changes == [(0, (1.0,)), (8, (0.25,)), (10, (1.0,)), (18, (0.25,)), (20, (1.0,))]


def test_a_steady_schedule_has_one_stage() -> None:
    assert list(steady([0.5, 1.0]).changes()) == [(0, (0.5, 1.0))]
    assert steady([0.5, 1.0]).num_workers == 2


@pytest.mark.parametrize(
    ("starts", "levels", "every"),
    [
        ((), (), math.inf),
        ((0.0,), ((1.0,), (2.0,)), math.inf),
        ((1.0,), ((1.0,),), math.inf),
        ((0.0, 2.0, 1.0), ((1.0,),) * 3, math.inf),
        ((0.0, 5.0), ((1.0,), (2.0,)), 5.0),
        ((0.0, 5.0), ((1.0,), (2.0, 3.0)), math.inf),
        ((0.0,), ((),), math.inf),
    ],
)
def test_a_schedule_out_of_order_is_refused(
    starts: tuple[float, ...], levels: tuple[tuple[float, ...], ...], every: float
) -> None:
    with pytest.raises(ValueError, match="schedule"):
        Schedule(starts=starts, levels=levels, every=every)


@pytest.mark.parametrize(("num_workers", "h", "total"), [(1, 2, 4), (3, 0.5, 4), (3, 2, 0)])
def test_impossible_unevenness_is_refused(num_workers: int, h: float, total: float) -> None:
    with pytest.raises(ValueError, match=r"num_workers|h:|total_cores"):
        h_level(num_workers, h, total)
