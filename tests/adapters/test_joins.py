"""Workers join, and leave, at points where a framework's loop must go on as if none had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench.matrix.cases import CASES
from bench.matrix.cells import Ways

from evenstep.journal import read
from evenstep.types import StepDone

pytestmark = pytest.mark.long


def ways(name: str, folder: Path) -> Ways:
    (case,) = [case for case in CASES if case.name == name]
    if case.missing:
        pytest.skip(f"needs {', '.join(case.missing)}")
    return Ways(case, folder / "ways", np.random.default_rng(0))


# The worker asks to join with step 4 in hand, the leader to leave with step 13: both begin a
# window, or are inside of one. Epochs have eleven steps, those of `ema` ten.
ENDS = {
    "hugging_face": (6, 15),  # windows of two
    "with_lightning": (6, 15),
    "with_accelerate": (8, 15),  # windows of four, the last of an epoch is shorter
    "with_fabric": (6, 15),
    "ema": (8, 14),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_roster_changes_at_the_end_of_a_window(name: str, tmp_path: Path) -> None:
    run = ways(name, tmp_path)
    run.changes(joins=4, leaves=13)
    events = [record.event for record in read(run.journal("elastic"))[1]]
    steps = [(e.step, e.generation) for e in events if isinstance(e, StepDone)]
    joined, left = ENDS[name]
    assert {generation for _, generation in steps} == {1, 2, 3}
    for step, generation in steps:
        assert generation == 1 + (step >= joined) + (step >= left), steps


@pytest.mark.parametrize(
    "name", ["hugging_face", "with_lightning", "with_accelerate", "with_fabric"]
)
def test_a_worker_joins_at_the_first_batch_of_an_epoch(name: str, tmp_path: Path) -> None:
    """Lightning has just written a checkpoint: the joiner must not write another one."""
    ways(name, tmp_path).changes(joins=10)
