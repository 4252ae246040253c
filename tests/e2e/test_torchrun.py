"""Real processes under torchrun, as users start them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from bench.testbed.fork_server import fork_server

from evenstep.launch.environment import torchrun_variables
from evenstep.verify.records import ENV_VARIABLE, VerifiedRun

HERE = Path(__file__).parent
ORDER = "data: epochs of 203 samples, shuffled with seed 0; 20 samples a step"


def torchrun(num: int, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num}", str(HERE / script), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


LONG = pytest.mark.long


def test_each_sample_counts_once_an_epoch_while_plans_change(tmp_path: Path) -> None:
    """Three ranks with torchrun's variables, in processes that start faster than by torchrun."""
    log, shared = tmp_path / "log", torchrun_variables(3)
    argv: list[str | Path] = [HERE / "count_samples.py", tmp_path, "0"]
    ranks = [
        fork_server().run(argv, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, log)
        for rank in range(3)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0, 0], log.read_text()
    check_ranks(tmp_path)
    assert log.read_text().count(ORDER) == 1


@pytest.mark.parametrize("is_verified", [False, True])
def test_a_process_alone_says_in_which_order_it_uses_the_data(
    tmp_path: Path, is_verified: bool
) -> None:
    run = VerifiedRun(folder=str(tmp_path), name="one", num_steps=2, shares=(1,))
    environment = {ENV_VARIABLE: msgspec.json.encode(run).decode()} if is_verified else {}
    argv: list[str | Path] = [HERE / "count_samples.py", tmp_path, "0", "kept"]
    log = tmp_path / "log"
    assert fork_server().run(argv, environment, log).wait() == 0, log.read_text()
    assert log.read_text().count(ORDER) == (not is_verified)


@LONG
@pytest.mark.parametrize("options", [["0"], ["2"], ["0", "compiled"]], ids=" ".join)
def test_so_it_does_under_torchrun(tmp_path: Path, options: list[str]) -> None:
    """Without loader workers, with two of them, and with a compiled model."""
    done = torchrun(3, "count_samples.py", str(tmp_path), *options)
    assert done.returncode == 0, done.stderr
    check_ranks(tmp_path)


def check_ranks(folder: Path) -> None:
    ranks = [json.loads((folder / f"{r}.json").read_text()) for r in range(3)]
    assert len({len(r["epochs"]) for r in ranks}) == 1
    for epoch in range(len(ranks[0]["epochs"])):
        assert sorted(i for r in ranks for i in r["epochs"][epoch]) == list(range(203))
    assert ranks[0]["weight"] == ranks[1]["weight"] == ranks[2]["weight"]
    assert ranks[0]["plans"] == ranks[1]["plans"] == ranks[2]["plans"]
    assert ranks[0]["plans"][0] != ranks[0]["plans"][-1]


@LONG
def test_fixed_shares_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = "policy={name: fixed, shares: [2, 3, 15]}"
    monkeypatch.setenv("EVENSTEP_SET", policy)
    done = torchrun(3, "count_samples.py", str(tmp_path), "0", "kept")
    assert done.returncode == 0, done.stderr
    plans = json.loads((tmp_path / "0.json").read_text())["plans"]
    assert all(plan == [2, 3, 15] for plan in plans)


@LONG
def test_a_rank_that_raises_ends_all_ranks_and_all_show_its_traceback() -> None:
    done = torchrun(5, "failing_rank.py")
    assert done.returncode != 0
    assert "ZeroDivisionError: a bug in the user's loss" in done.stderr
    first = done.stderr.index("ZeroDivisionError")
    assert "WorkerLostError" not in done.stderr[:first]
    assert "Operation timed out" not in done.stderr
