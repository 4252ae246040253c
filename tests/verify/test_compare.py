"""What is concluded from what two runs left."""

from __future__ import annotations

from math import isnan, nan

import numpy as np
import pytest

from evenstep.verify.compare import (
    Gap,
    gap,
    judge_data,
    judge_gradients,
    judge_parameters,
)
from evenstep.verify.records import Record, Step


def record(*steps: list[int], parameters: str = "p", content: str = "c") -> Record:
    """A rank that had these samples in these steps, in single precision."""
    rows = (tuple((index, f"{content}{index}") for index in indices) for indices in steps)
    made = tuple(Step(samples=row, parameters=parameters) for row in rows)
    return Record(dtypes=("torch.float32",), steps=made)


def gaps(*errors: float, ratio: float = 1.0) -> list[Gap]:
    return [Gap(error=error, parameter="weight", length=1.0, ratio=ratio) for error in errors]


ALONE = record([3, 1, 2, 0], [7, 6, 5, 4])
TOGETHER = [record([3, 1], [7]), record([2], [6, 5]), record([0], [4])]


def test_samples_that_are_all_there_once_agree_however_they_are_cut() -> None:
    found = judge_data(ALONE, TOGETHER)
    assert found.agree
    assert found.told == "8 samples, each once and the same as alone; in step 1 shared as 2, 1, 1"


def test_a_lost_and_a_repeated_sample_are_named() -> None:
    found = judge_data(ALONE, [record([3, 1], [7]), record([3], [6, 5]), record([0], [4])])
    assert found.agree is False
    assert found.told == "step 1: sample 2 lost, sample 3 repeated or foreign"


def test_a_sample_in_another_step_than_alone_is_lost_to_its_own() -> None:
    found = judge_data(ALONE, [record([3, 7], [1]), *TOGETHER[1:]])
    assert found.told == "step 1: sample 1 lost, sample 7 repeated or foreign"


def test_the_same_index_with_another_content_is_another_sample() -> None:
    found = judge_data(ALONE, [*TOGETHER[:2], record([0], [4], content="d")])
    assert found.agree is False
    assert "worker 2 read something else than the run alone for sample 0" in found.told


def test_a_worker_that_took_fewer_steps_is_named() -> None:
    found = judge_data(ALONE, [*TOGETHER[:2], record([0])])
    assert (found.agree, found.told) == (False, "worker 2 took 1 steps, alone 2")


def test_a_script_without_a_step_proves_nothing() -> None:
    assert judge_data(Record(), [Record(), Record()]).agree is False


def test_workers_with_other_parameters_are_named() -> None:
    assert judge_parameters(TOGETHER).agree
    found = judge_parameters([*TOGETHER[:2], record([0], [4], parameters="q")])
    assert found.agree is False
    assert "worker 2 ended step 1" in found.told


@pytest.mark.parametrize(
    ("dtypes", "error", "agree"),
    [
        (["torch.float32"], 0.9e-4, True),
        (["torch.float32"], 1.1e-4, False),
        (["torch.float64"], 0.9e-10, True),
        (["torch.float64"], 1.1e-10, False),
        (["torch.float64", "torch.float32"], 0.9e-4, True),
        (["torch.float32", "torch.bfloat16"], 4.9e-2, True),
        (["torch.float32", "torch.bfloat16"], 5.1e-2, False),
    ],
)
def test_the_coarsest_precision_sets_the_limit(
    dtypes: list[str], error: float, agree: bool
) -> None:
    alone = Record(dtypes=tuple(dtypes), steps=ALONE.steps)
    assert judge_gradients(alone, TOGETHER, gaps(0.0, error)).agree is agree


def test_a_script_that_differs_from_itself_cannot_be_judged() -> None:
    found = judge_gradients(ALONE, TOGETHER, gaps(0.3, 0.3), gaps(0.2, 0.4))
    assert found.agree is None
    assert "they differ by 4.0e-01 between two runs alone" in found.told


def test_gradients_that_shrink_as_the_shares_squared_come_from_a_sum() -> None:
    found = judge_gradients(ALONE, TOGETHER, gaps(0.6, 0.6, ratio=6 / 16), gaps(0.0, 0.0))
    assert found.agree is False
    assert "but a sum" in found.told


def test_local_batch_norm_is_the_reason_where_there_is_any() -> None:
    alone = Record(dtypes=ALONE.dtypes, local_norms=("a", "b", "c", "d"), steps=ALONE.steps)
    found = judge_gradients(alone, TOGETHER, gaps(0.0, 0.3))
    assert found.agree is False
    assert "BatchNorm (a, b, c ...)" in found.told
    assert judge_gradients(alone, TOGETHER, gaps(0.0, 0.0)).agree


def test_a_gradient_that_is_not_finite_does_not_agree() -> None:
    found = judge_gradients(ALONE, TOGETHER, gaps(0.0, nan), gaps(0.0, nan))
    assert found.agree is False
    assert "not finite" in found.told


def test_gradients_of_zero_prove_nothing() -> None:
    zero = gap({"one": np.zeros(2)}, {"one": np.zeros(2)})
    assert judge_gradients(ALONE, TOGETHER, [zero, zero]).agree is None


def test_the_error_is_that_of_the_parameter_that_is_furthest_off() -> None:
    one, two = np.array([3.0, 4.0]), np.array([[1.0]])
    apart = gap({"one": one, "two": two}, {"one": one, "two": two * 1.5})
    assert (apart.error, apart.parameter) == (0.5, "two")


def test_next_to_no_gradient_is_measured_against_all() -> None:
    one = np.array([3.0, 4.0])
    apart = gap({"one": one, "two": np.array([1e-9])}, {"one": one, "two": np.array([-1e-9])})
    assert apart.error == pytest.approx(2e-9 / 0.5)


def test_a_gradient_on_one_side_only_is_a_whole_error() -> None:
    one = np.array([3.0, 4.0])
    assert gap({"one": one, "two": one}, {"one": one}).error == 1.0
    assert gap({"one": one}, {"one": one, "two": one}).parameter == "two"


def test_no_gradient_equals_itself_and_nan_does_not() -> None:
    zero = np.zeros(2)
    assert gap({}, {}).error == gap({"one": zero}, {"one": zero}).error == 0.0
    broken = gap({"one": zero, "two": zero + nan}, {"one": zero + 1, "two": zero})
    assert isnan(broken.error)
    assert broken.parameter == "two"
