"""A worker lost in a loop that accumulates, has several optimizers, sums up, or is left early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.cluster import Cluster
from tests.faults.conftest import Alone
from tests.faults.watching import HELD, Fault, same

LOOPS = Path(__file__).with_name("loops.py")

CASES: list[tuple[str, tuple[Fault, ...]]] = [  # one after the other, six workers to begin with
    ("accumulate", (("rank3", "backward", 7), ("leader", "bucket", 14), ("rank3", "reduced", 22))),
    ("accumulate", (("rank3", "bucket", 7), ("rank2", "stepped", 15), ("leader", "reduced", 22))),
    ("turns", (("leader", "backward", 0), ("rank3", "forward", 14), ("rank3", "stepped", 22))),
    ("turns", (("rank3", "backward", 7), ("rank2", "bucket", 14), ("leader", "reduced", 22))),
    ("sums", (("rank3", "forward", 7), ("leader", "summed", 14), ("rank3", "bucket", 22))),
    ("sums", (("rank3", "summed", 7), ("rank2", "reduced", 14), ("leader", "forward", 22))),
    ("leaves", (("rank3", "left", 8), ("leader", "bucket", 15), ("rank3", "backward", 20))),
    ("leaves", (("leader", "left", 8), ("rank3", "reduced", 15), ("leader", "stepped", 20))),
]


def case(i: int) -> Any:
    """The first of each loop's two cases for every change, the second for `make test-long`."""
    loop, faults = CASES[i]
    marks = [pytest.mark.long] * (i % 2)
    return pytest.param(loop, faults, marks=marks, id="-".join([loop, *(f[1] for f in faults)]))


@pytest.mark.parametrize(("loop", "faults"), [case(i) for i in range(len(CASES))])
def test_survivors_end_where_one_process_ends(
    loop: str, faults: tuple[Fault, ...], tmp_path: Path, alone: Alone
) -> None:
    args = ["--loop", loop]
    with Cluster(tmp_path, workers=6, args=args, faults=faults, script=LOOPS) as run:
        assert run.finish() == 0
        assert len(list(run.out.glob("fault-*"))) == 3
        assert len(run.results()) == 3
        expected = alone(*args, script=LOOPS)
        assert all(same(result, expected) for result in run.results().values())


@pytest.mark.long
def test_a_backward_pass_that_leads_to_nothing_is_broken_off(tmp_path: Path, alone: Alone) -> None:
    args = ["--loop", "deep"]
    faults = (("rank3", "backward", 14),)
    with Cluster(tmp_path, workers=5, args=args, faults=faults, script=LOOPS) as run:
        assert run.finish() == 0
        assert len(run.results()) == 4
        expected = alone(*args, script=LOOPS)
        assert all(same(result, expected) for result in run.results().values())
        told = [line for line in run.said().splitlines() if "broken off" in line]
    assert len(told) == 4


def test_who_joins_later_takes_no_part_in_sums_that_the_others_took_before(
    tmp_path: Path, alone: Alone
) -> None:
    args = ["--loop", "sums", *HELD]
    with Cluster(tmp_path, workers=3, restarts=1, args=args, script=LOOPS) as run:
        status = run.until_training(3)
        run.until_step(3)  # the sum before the first batch is over
        run.signal("w1")  # its substitute sums up before its first batch
        run.until_training(3, after=status["generation"])
        assert run.finish() == 0
        expected = alone(*args, *run.length, script=LOOPS)
        assert all(same(result, expected) for result in run.results().values())
        seen = [line for line in run.said().splitlines() if "samples seen before" in line]
    assert len(seen) == 4
    assert all(" 50 samples" in line for line in seen)
