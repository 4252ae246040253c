"""A void step leaves nothing behind."""

from __future__ import annotations

import torch

from evenstep.train.recover.rollback import Rollback
from evenstep.train.recover.state import TrainingState
from evenstep.train.step import Batch, Step


def test_a_void_step_takes_its_reductions_and_sums_back() -> None:
    """Otherwise a new generation would take this worker's state for that of a later step."""
    step = Step()
    rollback = Rollback(step, torch.nn.Linear(1, 1), {}, TrainingState({}, {}, {}))
    step.number, step.num_reduced, step.num_sums = 7, 7, 3
    step.on_fetched.append(rollback.begin_step)
    step.fetched(Batch(step=7, samples=1), 0.0)
    step.reduced([], None)  # the first of two backward passes
    step.num_sums += 1
    assert (step.num_reduced, step.num_sums, step.num_unused) == (8, 4, 1)
    step.void()
    rollback.restore()
    assert (step.num_reduced, step.num_sums, step.num_unused) == (7, 3, 0)
