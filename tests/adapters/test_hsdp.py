"""Hosts whose processes shard one model with FSDP2: each is one worker of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from bench.testbed.live_run import HELD, Fault, until
from bench.testbed.train import INJECTED, post

from tests.adapters.sharded import net
from tests.faults.cluster import Cluster
from tests.faults.conftest import Alone

SCRIPT = Path(__file__).with_name("sharded.py")
EPOCH_STEPS = 5
TOLERANCE = 1e-12  # relative, in double precision


def hosts(folder: Path, *args: str, workers: int = 2, **terms: Any) -> Cluster:
    """So many hosts of two processes."""
    return Cluster(folder, workers=workers, script=SCRIPT, args=args, **terms)


def check(run: Cluster, reference: dict[str, Any], *names: str) -> None:
    """All processes of these hosts have the parameters of one process."""
    results = run.results()
    assert sorted(results) == sorted(f"{name}-{i}" for name in names for i in (0, 1))
    for result in results.values():
        pairs = [(result["model"][name], tensor) for name, tensor in reference["model"].items()]
        squared = sum(float((mine - theirs).square().sum()) for mine, theirs in pairs)
        whole = sum(float(theirs.square().sum()) for _, theirs in pairs)
        error = (squared / whole) ** 0.5
        assert error <= TOLERANCE, f"relative error {error:.2g}"
        assert (result["step"], result["lr"]) == (reference["step"], reference["lr"])


def num_epochs(run: Cluster) -> list[str]:
    """For one process to train as long as a held run did."""
    (step,) = {result["step"] for result in run.results().values()}
    return ["--epochs", str(step // EPOCH_STEPS)]


def test_uneven_hosts_train_like_one_process(tmp_path: Path, alone: Alone) -> None:
    """Odd shares, a mean of tokens, accumulation, clipping by the norm over all shards."""
    args = "--tokens", "--accumulate", "2"
    with hosts(tmp_path, "--shares", "17,7", *args) as run:
        assert run.finish() == 0
        check(run, alone(*args, script=SCRIPT), "w0", "w1")


@pytest.mark.long
@pytest.mark.parametrize("policy", [(), ("--shares", "23,1")], ids=["auto", "one sample"])
def test_shares_of_any_size(tmp_path: Path, alone: Alone, policy: tuple[str, ...]) -> None:
    """A process without a sample of its own counts for nothing."""
    with hosts(tmp_path, *policy) as run:
        assert run.finish() == 0
        check(run, alone(script=SCRIPT), "w0", "w1")


@pytest.mark.long
@pytest.mark.parametrize("fault", [("w1", "backward-1", 6), ("w1", "reduced-0", 7)], ids=str)
def test_a_process_that_is_killed_takes_its_host_with_it(
    tmp_path: Path, alone: Alone, fault: Fault
) -> None:
    with hosts(tmp_path, workers=3, faults=[fault]) as run:
        assert run.finish() == 0
        check(run, alone(script=SCRIPT), "w0", "w2")
        assert "Traceback" not in run.output()


@pytest.mark.long
def test_what_one_process_cannot_reduce_is_void_on_its_whole_host(
    tmp_path: Path, alone: Alone
) -> None:
    """Only the second processes lose each other; the first ones have their sums."""
    with hosts(tmp_path, "--cut") as run:
        assert run.finish() == 0
        assert "step 6 is void" in run.output()
        check(run, alone(script=SCRIPT), "w0", "w1")


@pytest.mark.long
def test_a_script_that_fails_in_one_process_fails(tmp_path: Path) -> None:
    with hosts(tmp_path, *HELD) as run:
        run.until_step(4)
        fault = post(run.out, "any", "forward-1", "raise")
        assert run.wait() == 1
        assert not fault.exists()
        assert INJECTED in run.output()
        assert not run.results()


@pytest.mark.long
def test_a_lost_host_is_replaced_by_one_with_the_shards_of_the_others(
    tmp_path: Path, alone: Alone
) -> None:
    with hosts(tmp_path, *HELD, restarts=1) as run:
        run.until_step(4)
        lost = psutil.Process(run.pids()["w1"])
        (other,) = lost.children()
        generation = run.status()["generation"]
        other.kill()
        until(lambda: not lost.is_running() or lost.status() == psutil.STATUS_ZOMBIE)
        step = run.until_training(2, after=generation + 1)["step"]
        run.until_step(step + 2)
        assert run.finish() == 0
        check(run, alone(*num_epochs(run), script=SCRIPT), "w0", "w2")


@pytest.mark.long
def test_a_host_leaves_when_any_of_its_processes_is_told_to(tmp_path: Path, alone: Alone) -> None:
    with hosts(tmp_path, *HELD) as run:
        run.until_step(4)
        generation = run.status()["generation"]
        (other,) = psutil.Process(run.pids()["w1"]).children()
        other.terminate()
        run.until_training(1, after=generation)
        assert run.finish() == 0
        assert "w1 leaves the run" in run.output()
        check(run, alone(*num_epochs(run), script=SCRIPT), "w0")


@pytest.mark.long
def test_a_run_resumes_from_checkpoints_of_the_whole_model(tmp_path: Path, alone: Alone) -> None:
    with hosts(tmp_path, *HELD) as run:
        run.until_step(7)
        run.ask("stop")
        run.wait()
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*.pt"))
    model = torch.load(newest, weights_only=True)["state"]["models"]["model"]
    net().double().load_state_dict(model)
    with hosts(tmp_path, *HELD) as run:
        run.until_step(12)
        assert run.finish() == 0
        assert "resuming from step-" in run.output()
        names = {name.partition("-")[0] for name in run.results()}
        check(run, alone(*num_epochs(run), script=SCRIPT), *names)
