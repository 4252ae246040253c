"""Findings from the records of two runs."""

from __future__ import annotations

from math import isnan, nan

import numpy as np
import pytest

from evenstep.verify.compare import (
    GradientGap,
    compare_data,
    compare_gradients,
    compare_parameters,
    gradient_gap,
)
from evenstep.verify.records import RankRecord, StepRecord


def record(*steps: list[int], parameters: str = "p", content: str = "c") -> RankRecord:
    """The record of a rank that had these samples in these steps, in single precision."""
    rows = (tuple((index, f"{content}{index}") for index in indices) for indices in steps)
    made = tuple(StepRecord(samples=row, parameters=parameters) for row in rows)
    return RankRecord(dtypes=("torch.float32",), steps=made)


def gaps(*errors: float, ratio: float = 1.0) -> list[GradientGap]:
    return [GradientGap(error=error, parameter="weight", norm=1.0, ratio=ratio) for error in errors]


REFERENCE = record([3, 1, 2, 0], [7, 6, 5, 4])
DISTRIBUTED = [record([3, 1], [7]), record([2], [6, 5]), record([0], [4])]


def test_data_agrees_if_every_sample_is_used_once_by_any_worker() -> None:
    found = compare_data(REFERENCE, DISTRIBUTED)
    assert found.agrees
    assert found.message == "8 samples, each used once as alone; shares in step 1: 2, 1, 1"


def test_missing_and_repeated_samples_are_named() -> None:
    found = compare_data(REFERENCE, [record([3, 1], [7]), record([3], [6, 5]), record([0], [4])])
    assert found.agrees is False
    assert found.message == "step 1: sample 2 missing, sample 3 repeated or unexpected"


def test_a_sample_used_in_another_step_is_missing_in_its_own() -> None:
    found = compare_data(REFERENCE, [record([3, 7], [1]), *DISTRIBUTED[1:]])
    assert found.message == "step 1: sample 1 missing, sample 7 repeated or unexpected"


def test_the_same_index_with_different_content_is_reported() -> None:
    found = compare_data(REFERENCE, [*DISTRIBUTED[:2], record([0], [4], content="d")])
    assert found.agrees is False
    assert "worker 2 read different data than the run alone for sample 0" in found.message


def test_a_worker_that_took_fewer_steps_is_named() -> None:
    found = compare_data(REFERENCE, [*DISTRIBUTED[:2], record([0])])
    assert (found.agrees, found.message) == (False, "worker 2 took 1 steps, alone 2")


def test_a_script_without_a_step_does_not_agree() -> None:
    assert compare_data(RankRecord(), [RankRecord(), RankRecord()]).agrees is False


def test_workers_with_different_parameters_are_named() -> None:
    assert compare_parameters(DISTRIBUTED).agrees
    found = compare_parameters([*DISTRIBUTED[:2], record([0], [4], parameters="q")])
    assert found.agrees is False
    assert "worker 2 has different parameters than worker 0 after step 1" in found.message


@pytest.mark.parametrize(
    ("dtypes", "error", "agrees"),
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
    dtypes: list[str], error: float, agrees: bool
) -> None:
    reference = RankRecord(dtypes=tuple(dtypes), steps=REFERENCE.steps)
    assert compare_gradients(reference, DISTRIBUTED, gaps(0.0, error)).agrees is agrees


def test_a_script_that_differs_from_itself_cannot_be_compared() -> None:
    found = compare_gradients(REFERENCE, DISTRIBUTED, gaps(0.3, 0.3), gaps(0.2, 0.4))
    assert found.agrees is None
    assert "two runs alone with different seeds differ by 4.0e-01" in found.message


def test_gradients_that_shrink_by_the_squared_shares_come_from_a_summed_loss() -> None:
    found = compare_gradients(REFERENCE, DISTRIBUTED, gaps(0.6, 0.6, ratio=6 / 16), gaps(0.0, 0.0))
    assert found.agrees is False
    assert "but a sum" in found.message


def test_local_batch_norm_is_named_as_the_cause() -> None:
    reference = RankRecord(
        dtypes=REFERENCE.dtypes, local_norms=("a", "b", "c", "d"), steps=REFERENCE.steps
    )
    found = compare_gradients(reference, DISTRIBUTED, gaps(0.0, 0.3))
    assert found.agrees is False
    assert "BatchNorm (a, b, c ...)" in found.message
    assert compare_gradients(reference, DISTRIBUTED, gaps(0.0, 0.0)).agrees


def test_a_gradient_that_is_not_finite_does_not_agree() -> None:
    found = compare_gradients(REFERENCE, DISTRIBUTED, gaps(0.0, nan), gaps(0.0, nan))
    assert found.agrees is False
    assert "not finite" in found.message


def test_zero_gradients_cannot_be_compared() -> None:
    zero = gradient_gap({"one": np.zeros(2)}, {"one": np.zeros(2)})
    assert compare_gradients(REFERENCE, DISTRIBUTED, [zero, zero]).agrees is None


def test_the_error_is_that_of_the_worst_parameter() -> None:
    one, two = np.array([3.0, 4.0]), np.array([[1.0]])
    found = gradient_gap({"one": one, "two": two}, {"one": one, "two": two * 1.5})
    assert (found.error, found.parameter) == (0.5, "two")


def test_a_tiny_gradient_is_measured_against_the_whole() -> None:
    one = np.array([3.0, 4.0])
    found = gradient_gap(
        {"one": one, "two": np.array([1e-9])}, {"one": one, "two": np.array([-1e-9])}
    )
    assert found.error == pytest.approx(2e-9 / 0.5)


def test_a_gradient_on_one_side_only_is_an_error_of_one() -> None:
    one = np.array([3.0, 4.0])
    assert gradient_gap({"one": one, "two": one}, {"one": one}).error == 1.0
    assert gradient_gap({"one": one}, {"one": one, "two": one}).parameter == "two"


def test_missing_and_zero_gradients_agree_with_themselves_and_nan_does_not() -> None:
    zero = np.zeros(2)
    assert gradient_gap({}, {}).error == gradient_gap({"one": zero}, {"one": zero}).error == 0.0
    broken = gradient_gap({"one": zero, "two": zero + nan}, {"one": zero + 1, "two": zero})
    assert isnan(broken.error)
    assert broken.parameter == "two"
