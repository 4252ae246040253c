"""Evaluation in a loop of the script, as one of two workers sees it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from evenstep.adapters.gathering import from_bytes, ordered_batches, to_bytes
from evenstep.adapters.shared_evaluation import SharedEvaluation
from evenstep.errors import ConfigError, EvenstepError


def evaluation(num: int = 5, batch: int = 4, **session: Any) -> SharedEvaluation:
    """On the first of two workers; nothing ever arrives from the second."""
    data: Any = list(range(num))
    loader = DataLoader(data, batch_size=batch)
    framework = SimpleNamespace(
        is_late=False, begin_evaluation=lambda: None, part_of=lambda n: (0, (n + 1) // 2)
    )
    first: Any = SimpleNamespace(
        rank=0, world=2, generation=1, void=False, sum=torch.clone, framework=framework
    )
    vars(first).update(session)
    return SharedEvaluation(first, ordered_batches(loader, "x", "y"), loader, "gather")


def test_samples_that_do_not_arrive_are_evaluated_again() -> None:
    shared, rows = evaluation(), []
    for numbers in shared:
        rows.append(shared.gather("gather", numbers).tolist())
    assert rows == [[0, 1], [2], [3], [4]]


def test_a_void_step_evaluates_everything_for_nobody() -> None:
    shared, rows = evaluation(void=True), []
    for numbers in shared:
        rows.append(shared.gather("gather", numbers).tolist())
    assert rows == [[0, 1, 2, 3], [4]]


def test_trees_of_rows_are_gathered() -> None:
    shared = evaluation(2)
    for numbers in shared:
        tree = {"a": (numbers, torch.ones(1, 3)), "b": [str(int(numbers[0]))]}
        found = shared.gather("gather", tree)
        assert found["a"][0].tolist() == numbers.tolist()
        assert found["a"][1].shape == (1, 3)
        assert found["b"] == [str(int(numbers[0]))]


def test_sequences_are_padded_to_the_longest_of_all_workers() -> None:
    def of_two(values: torch.Tensor) -> torch.Tensor:
        """The sum with a second worker that has row 1, and sequences of 5."""
        if values.dtype == torch.float64:
            return values + torch.tensor([[0, 0], [1, len(theirs) + 1]])
        row = torch.frombuffer(bytearray(b"\1" + theirs), dtype=torch.uint8)
        return values + torch.cat([torch.zeros(len(values) - len(row), dtype=torch.uint8), row])

    theirs = to_bytes([5])
    shared = evaluation(2, sum=of_two)
    next(iter(shared))
    padded = shared.pad(torch.ones(1, 3), 1, -1, False)
    assert padded.tolist() == [[1, 1, 1, -1, -1]]
    assert shared.pad(torch.ones(1, 3), 1, -1, True).tolist() == [[-1, -1, 1, 1, 1]]


@pytest.mark.parametrize("value", [torch.tensor(1.0), torch.ones(3), 1.0, ["a"]])
def test_results_that_are_not_rows_are_refused_by_name(value: Any) -> None:
    shared = evaluation()
    for _ in shared:
        with pytest.raises(ConfigError, match="but this worker has 2 samples of the batch"):
            shared.gather("gather", value)
        break


def test_a_loop_that_gathers_nothing_is_refused_by_name() -> None:
    with pytest.raises(EvenstepError, match="it has not gathered the results"):
        list(evaluation(world=1))


def test_trees_survive_as_bytes() -> None:
    tree: Any = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": [torch.empty(0, 2), "text", 1.5]}
    again = from_bytes(to_bytes(tree))
    assert torch.equal(again["a"], tree["a"])
    assert again["b"][0].shape == (0, 2)
    assert again["b"][1:] == ["text", 1.5]
