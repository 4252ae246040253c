"""The min-max solver against brute force, and the properties that every plan relies on."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evenstep.decide.curves import AnyMonotone, FlatLinear
from evenstep.decide.split import in_proportion, split, water_fill
from evenstep.errors import BatchBoundsError, InvalidInputError
from evenstep.types import FloatArray, IntArray
from tests.hypothesis_examples import examples

times = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 7.0]) | st.floats(0, 10)


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def table_curves(rows: list[list[float]]) -> AnyMonotone:
    """Curves from arbitrary step times, made monotone: row i, share b."""
    table = np.maximum.accumulate(np.array(rows, dtype=np.float64), axis=1)
    last = table.shape[1] - 1
    index = np.arange(len(rows))

    def seconds(shares: IntArray) -> FloatArray:
        found: FloatArray = table[index, np.minimum(shares, last)]
        return found

    return AnyMonotone(function=seconds, upper=np.full(len(rows), last, dtype=np.int64))


@st.composite
def small_problems(draw: st.DrawFn) -> tuple[AnyMonotone, int, IntArray, IntArray]:
    n, most = draw(st.integers(1, 4)), 6
    rows = draw(
        st.lists(st.lists(times, min_size=most + 1, max_size=most + 1), min_size=n, max_size=n)
    )
    bounds = [sorted(draw(st.tuples(st.integers(0, most), st.integers(0, most)))) for _ in range(n)]
    lower, upper = ints(*(b[0] for b in bounds)), ints(*(b[1] for b in bounds))
    assume(upper.sum() >= 1)
    batch = draw(st.integers(max(1, int(lower.sum())), max(1, int(upper.sum()))))
    return table_curves(rows), batch, lower, upper


@st.composite
def fleets(draw: st.DrawFn) -> tuple[FlatLinear, int, IntArray, IntArray]:
    n = draw(st.integers(1, 8))
    column = st.lists(st.floats(0, 3), min_size=n, max_size=n)
    slope = st.lists(st.floats(1e-3, 3), min_size=n, max_size=n)
    curves = FlatLinear(
        floor_s=np.array(draw(column)),
        fixed_s=np.array(draw(column)),
        per_sample_s=np.array(draw(slope)),
    )
    upper = ints(*draw(st.lists(st.integers(1, 500), min_size=n, max_size=n)))
    batch = draw(st.integers(1, int(upper.sum())))
    return curves, batch, np.zeros(n, dtype=np.int64), upper


@examples(400)
@given(small_problems())
def test_split_finishes_as_early_as_brute_force(
    problem: tuple[AnyMonotone, int, IntArray, IntArray],
) -> None:
    curves, batch, lower, upper = problem
    ranges = (range(int(a), int(b) + 1) for a, b in zip(lower, upper, strict=True))
    best = min(
        curves.seconds(ints(*shares)).max() for shares in product(*ranges) if sum(shares) == batch
    )
    shares = split(curves, batch, lower, upper)
    assert shares.sum() == batch
    assert ((lower <= shares) & (shares <= upper)).all()
    assert curves.seconds(shares).max() == best


@examples(150)
@given(fleets())
def test_flat_linear_curves_invert_exactly(
    problem: tuple[FlatLinear, int, IntArray, IntArray],
) -> None:
    curves, batch, lower, upper = problem
    generic = AnyMonotone(function=curves.seconds, upper=upper)
    for deadline_s in (0.0, 0.1, float(curves.seconds(upper).max()), 2.5):
        closed = np.minimum(curves.max_shares(deadline_s), upper)
        assert (closed == generic.max_shares(deadline_s)).all()
    fast, slow = split(curves, batch, lower, upper), split(generic, batch, lower, upper)
    assert curves.seconds(fast).max() == curves.seconds(slow).max()


@examples(150)
@given(fleets())
def test_split_is_never_later_than_equal_shares(
    problem: tuple[FlatLinear, int, IntArray, IntArray],
) -> None:
    curves, batch, lower, upper = problem
    equal = water_fill(batch, lower, upper)
    shares = split(curves, batch, lower, upper)
    assert shares.sum() == equal.sum() == batch
    assert curves.seconds(shares).max() <= curves.seconds(equal).max()


@examples(150)
@given(fleets(), st.randoms(use_true_random=False))
def test_split_is_independent_of_the_order_of_workers(
    problem: tuple[FlatLinear, int, IntArray, IntArray], shuffler: object
) -> None:
    curves, batch, lower, upper = problem
    rows = set(zip(curves.floor_s, curves.fixed_s, curves.per_sample_s, upper, strict=True))
    assume(len(rows) == len(upper))  # equal workers differ only by the odd sample: tested below
    order = np.arange(len(upper))
    shuffler.shuffle(order)  # type: ignore[attr-defined]
    shuffled = FlatLinear(
        floor_s=curves.floor_s[order],
        fixed_s=curves.fixed_s[order],
        per_sample_s=curves.per_sample_s[order],
    )
    straight = split(curves, batch, lower, upper)[order]
    other = split(shuffled, batch, lower, upper[order])
    # Only samples with equal finish times may move between workers.
    differ = straight != other
    finish = np.maximum(straight, other)
    assert len(np.unique(shuffled.seconds(finish)[differ])) <= 1


@examples(150)
@given(fleets(), st.floats(1, 4), st.integers(0, 200))
def test_a_faster_worker_never_gets_less(
    problem: tuple[FlatLinear, int, IntArray, IntArray], factor: float, room: int
) -> None:
    curves, batch, lower, upper = problem

    def append(column: FloatArray) -> FloatArray:
        return np.append(column, column[0] / factor)

    both = FlatLinear(
        floor_s=append(curves.floor_s),
        fixed_s=append(curves.fixed_s),
        per_sample_s=append(curves.per_sample_s),
    )
    shares = split(both, batch, np.append(lower, 0), np.append(upper, upper[0] + room))
    tied = both.seconds(np.maximum(shares, shares[0]))
    assert shares[-1] >= shares[0] or (shares[-1] == shares[0] - 1 and tied[-1] == tied[0])


def test_equal_workers_get_equal_shares_and_the_first_the_odd_samples() -> None:
    assert in_proportion(np.ones(4), 10, np.zeros(4, np.int64), np.full(4, 10)).tolist() == [
        3,
        3,
        2,
        2,
    ]


def test_a_worker_too_slow_for_one_sample_gets_none() -> None:
    curves = FlatLinear(
        floor_s=np.zeros(3), fixed_s=np.array([0.1, 0.1, 9.0]), per_sample_s=np.full(3, 0.01)
    )
    assert split(curves, 20, np.zeros(3, np.int64), np.full(3, 20)).tolist() == [10, 10, 0]


def test_ten_thousand_workers_split_exactly() -> None:
    rng = np.random.default_rng(0)
    n = 10_000
    curves = FlatLinear(
        floor_s=rng.uniform(0, 0.1, n),
        fixed_s=rng.uniform(0, 0.05, n),
        per_sample_s=rng.uniform(1e-4, 1e-2, n),
    )
    lower, upper = np.zeros(n, np.int64), rng.integers(1, 4000, n)
    shares = split(curves, 320_000, lower, upper)
    assert shares.sum() == 320_000
    finish_s = curves.seconds(shares).max()
    late = np.clip(curves.max_shares(float(np.nextafter(finish_s, 0))), lower, upper)
    assert late.sum() < 320_000  # no earlier deadline holds the batch


@pytest.mark.parametrize("speeds", [[1.0, 1e7], [1.0, 1e9], [1e-6, 1.0, 1e6], [1.0, 1.0, 1e12]])
@pytest.mark.parametrize("batch", [1000, 10**6, 10**9])
def test_very_uneven_speeds_take_few_iterations(speeds: list[float], batch: int) -> None:
    curves, looks = FlatLinear.at_speed(np.array(speeds)), 0

    class Counted:
        def seconds(self, shares: IntArray) -> FloatArray:
            return curves.seconds(shares)

        def max_shares(self, deadline_s: float) -> IntArray:
            nonlocal looks
            looks += 1
            return curves.max_shares(deadline_s)

    n = len(speeds)
    shares = split(Counted(), batch, np.zeros(n, np.int64), np.full(n, batch))
    assert shares.sum() == batch
    assert looks <= 200


@pytest.mark.parametrize(
    ("batch", "lower", "upper", "says"),
    [
        (100, [0, 0], [30, 40], "a batch of 100 does not fit 2 workers that hold 70 in total"),
        (5, [4, 4], [30, 40], "a batch of 5 cannot give 2 workers their minimum, 8 in total"),
        (5, [], [], "there is no worker for a batch of 5"),
    ],
)
def test_bounds_that_cannot_hold_the_batch_are_refused_with_the_numbers(
    batch: int, lower: list[int], upper: list[int], says: str
) -> None:
    with pytest.raises(BatchBoundsError, match=says) as caught:
        in_proportion(np.ones(len(lower)), batch, ints(*lower), ints(*upper))
    assert (caught.value.batch, caught.value.most) == (batch, sum(upper))


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_speed_is_refused(speed: float) -> None:
    with pytest.raises(InvalidInputError, match="samples_per_s: must be above 0 and finite"):
        in_proportion(np.array([1.0, speed]), 4, ints(0, 0), ints(4, 4))


def test_an_invalid_curve_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="curve 1: fixed_s"):
        FlatLinear(floor_s=np.zeros(2), fixed_s=np.array([0, np.nan]), per_sample_s=np.ones(2))


@pytest.mark.parametrize(("lower", "upper"), [([3], [2]), ([-1], [2])])
def test_invalid_bounds_are_refused(lower: list[int], upper: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="is no valid range"):
        in_proportion(np.ones(1), 2, ints(*lower), ints(*upper))
