"""SIGKILL of workers and leaders at every critical point of a step.

Six workers, so that some survivors are not neighbours of the lost one in Gloo's ring and cannot
detect the loss by themselves. With three, all survivors are neighbours.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.testbed.live_run import Fault, same

from tests.faults.cluster import Cluster
from tests.faults.conftest import Alone

CASES: list[tuple[Fault, ...]] = [
    *[(("rank3", point, 7), ("leader", point, 17)) for point in ("forward", "bucket")],
    (("rank2", "epoch", 10), ("leader", "epoch", 20)),  # before the sum at the epoch's end
    (("rank3", "reduced", 7), ("leader", "handover", -1)),
    (("rank4", "checkpoint", -1), ("leader", "checkpoint", -1)),
]
MORE: list[tuple[Fault, ...]] = [
    *[(("rank3", point, 7), ("leader", point, 17)) for point in ("backward", "reduced", "stepped")],
    (("rank1", "reduced", 9), ("rank3", "backward", 9)),  # two in the epoch's last step
    (("rank1", "backward", 7), ("rank2", "backward", 7)),
    (("leader", "backward", 7), ("rank3", "bucket", 7)),
    (("rank3", "backward", 7), ("leader", "rendezvous", 7)),  # the next leader, during rendezvous
    (("rank3", "backward", 7), ("rank1", "compare", 7)),
]


@pytest.mark.parametrize(
    "faults",
    [*CASES, *(pytest.param(faults, marks=pytest.mark.long) for faults in MORE)],
    ids=lambda fs: "+".join(f"{f[0]}-{f[1]}" for f in fs),
)
def test_survivors_end_where_one_process_ends(
    faults: tuple[Fault, ...], tmp_path: Path, alone: Alone
) -> None:
    args = ["--pause", "0.005"]
    with Cluster(tmp_path, args=args, faults=faults, checkpoint_every_s=0.1) as run:
        assert run.finish() == 0
        died = list(run.out.glob("fault-*"))
        assert len(run.results()) == 6 - len(died)
        assert died
        assert all(same(result, alone()) for result in run.results().values())
