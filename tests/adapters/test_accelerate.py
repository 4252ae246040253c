"""A loop for Accelerate as workers, compared with Accelerate in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.testbed.cli_run import ENVIRONMENT
from bench.testbed.fork_server import fork_server
from bench.testbed.live_run import Fault

from tests.faults.cluster import Cluster

pytest.importorskip("accelerate", reason='pip install "evenstep[hf]"')

pytestmark = pytest.mark.long  # `make test-long` installs the framework, `make test` does not

SCRIPT = Path(__file__).with_name("accelerate_train.py")
PRELOAD = ("evenstep.adapters.accelerate",)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of Accelerate in one process."""
    out = tmp_path_factory.mktemp("plain")
    argv: list[str | Path] = [SCRIPT, "--out", out, "--plain"]
    assert fork_server(*PRELOAD).run(argv, {}, out / "log").wait() == 0, (out / "log").read_text()
    return dict(torch.load(out / "plain.pt", weights_only=True))


def check(result: dict[str, Any], plain: dict[str, Any]) -> None:
    for name, tensor in plain["model"].items():
        assert float((result["model"][name] - tensor).abs().max()) <= 1e-12, name
    assert result["lr"] == pytest.approx(plain["lr"], rel=1e-12)
    for rows, expected in zip(result["evaluated"], plain["evaluated"], strict=True):
        by_number = [sorted(found, key=lambda row: row[1]) for found in (rows, expected)]
        for row, other in zip(*by_number, strict=True):
            assert row == pytest.approx(other, rel=1e-9)


def run(folder: Path, *args: str, faults: tuple[Fault, ...] = (), workers: int) -> Cluster:
    return Cluster(
        folder, args=args, faults=faults, script=SCRIPT, preload=PRELOAD, workers=workers
    )


KILLS: tuple[Any, ...] = (
    (("rank3", "bucket", 1), ("leader", "backward", 6), ("rank1", "reduced", 17)),
    (("rank1", "forward", 0), ("rank2", "stepped", 9), ("leader", "bucket", 29)),
)


@pytest.mark.parametrize("faults", KILLS)
def test_workers_are_killed_in_the_middle_of_windows(
    faults: tuple[Fault, ...], tmp_path: Path, plain: dict[str, Any]
) -> None:
    """With accumulation, a short window at the end of an epoch, clipping and a schedule."""
    with run(tmp_path, faults=faults, workers=5) as cluster:
        assert cluster.finish() == 0
        assert len(cluster.results()) == 2
        for result in cluster.results().values():
            check(result, plain)


def test_workers_are_lost_in_the_evaluation(tmp_path: Path, plain: dict[str, Any]) -> None:
    faults = (("rank1", "predict", 10), ("leader", "predict", 20), ("rank2", "predict", 30))
    with run(tmp_path, faults=faults, workers=5) as cluster:
        assert cluster.finish() == 0
        assert len(list(cluster.out.glob("fault-*"))) == 3
        assert len(cluster.results()) == 2
        for result in cluster.results().values():
            check(result, plain)


def test_an_evaluation_is_shared_out_and_gathered_in_its_order(
    tmp_path: Path, plain: dict[str, Any]
) -> None:
    with run(tmp_path, workers=3) as cluster:
        assert cluster.finish() == 0
        assert len(cluster.results()) == 3
        for result in cluster.results().values():
            for rows, expected in zip(result["evaluated"], plain["evaluated"], strict=True):
                assert [row[1:] for row in rows] == [row[1:] for row in expected]


@pytest.mark.parametrize(
    ("gathers", "faults", "told"),
    [
        ("never", (), "it has not gathered the results"),
        ("twice", (("rank1", "between", 10),), "a worker was lost between two calls"),
    ],
)
def test_evaluations_that_cannot_be_right_are_refused_by_name(
    gathers: str, faults: tuple[Fault, ...], told: str, tmp_path: Path
) -> None:
    with run(tmp_path, "--gathers", gathers, faults=faults, workers=3) as cluster:
        assert cluster.finish() != 0
        assert told in cluster.output()


def test_workers_miss_results(tmp_path: Path, plain: dict[str, Any]) -> None:
    """Of the first, a middle and the last batch of a window, and the last of an epoch."""
    steps = (4, 6, 13, 19)
    faults = tuple(("rank1", "reduced", step) for step in steps)
    with run(tmp_path, "--lose", *map(str, steps), faults=faults, workers=6) as cluster:
        assert cluster.finish() == 0
        assert len(cluster.results()) == 2
        for result in cluster.results().values():
            check(result, plain)


def test_two_processes_under_torchrun(tmp_path: Path, plain: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(SCRIPT), "--out", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    results = [torch.load(tmp_path / f"alone{rank}.pt", weights_only=True) for rank in (0, 1)]
    for result in results:
        check(result, plain)
    assert [result["writes"] for result in results] == [3, 0]


def test_what_sees_one_process_only_is_refused_by_name(tmp_path: Path) -> None:
    for name, told in (
        ("reduce", "session.sum elsewhere"),
        ("gather_for_metrics", "outside of a loop over a DataLoader of accelerator.prepare"),
    ):
        argv: list[str | Path] = [SCRIPT, "--out", tmp_path, "--call", name]
        assert fork_server(*PRELOAD).run(argv, {}, tmp_path / "log").wait() != 0
        assert told in (tmp_path / "log").read_text()
