"""Hugging Face's Trainer as workers, compared with transformers' own Trainer in one process."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench.testbed.cli_run import ENVIRONMENT, CliRun
from bench.testbed.fork_server import fork_server
from bench.testbed.live_run import Fault

from evenstep.errors import ConfigError
from tests.faults.cluster import Cluster

pytest.importorskip("transformers", reason='pip install "evenstep[hf]"')
pytest.importorskip("accelerate", reason='pip install "evenstep[hf]"')

pytestmark = pytest.mark.long  # `make test-long` installs the framework, `make test` does not

SCRIPT = Path(__file__).with_name("hf_train.py")
PRELOAD = ("evenstep.adapters.hf", "transformers.models.gpt2.modeling_gpt2")
OFFLINE = {"HF_HUB_OFFLINE": "1"}
STEPS = 28  # batches in four epochs

Plain = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Train with transformers' own Trainer; cached by arguments."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def train(*args: str) -> dict[str, Any]:
        if args not in known:
            out = tmp_path_factory.mktemp("plain")
            argv: list[str | Path] = [SCRIPT, "--out", out, "--plain", *args]
            forked = fork_server(*PRELOAD).run(argv, OFFLINE, out / "log")
            assert forked.wait() == 0, (out / "log").read_text()
            known[args] = torch.load(out / "plain.pt", weights_only=True)
        return known[args]

    return train


def check(result: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Parameters, schedule, every logged number and every metric are those of one process."""
    for name, tensor in expected["model"].items():
        scale = max(1.0, float(tensor.abs().max()))
        error = float((result["model"][name] - tensor).abs().max()) / scale
        assert error <= tolerance, f"{name}: {error:.2g}"
    assert result["step"] == expected["step"]
    assert result["lr"] == expected["lr"]
    history, logged = json.loads(result["history"]), json.loads(expected["history"])
    assert len(history) == len(logged)
    for entry, other in zip(history, logged, strict=True):
        assert entry == pytest.approx(other, rel=max(1e-6, tolerance), abs=1e-6)
    assert result["train_loss"] == pytest.approx(expected["train_loss"], rel=max(1e-6, tolerance))


def run(folder: Path, *args: str, faults: tuple[Fault, ...] = (), **more: Any) -> Cluster:
    return Cluster(folder, args=args, faults=faults, script=SCRIPT, preload=PRELOAD, **more)


@pytest.mark.parametrize("accumulate", ["1", "3"])
def test_three_workers_train_like_one_process(
    accumulate: str, tmp_path: Path, plain: Plain
) -> None:
    """With windows of tokens, clipping, a schedule, evaluation, metrics, logs and callbacks."""
    args = ("--double", "--accumulate", accumulate)
    with run(tmp_path, *args, workers=3) as cluster:
        assert cluster.finish() == 0
        results = cluster.results()
        assert len(results) == 3
        for result in results.values():
            check(result, plain(*args), 1e-12)
            assert result["steps"] == plain(*args)["steps"]
        assert sorted(bool(r["writes"]) for r in results.values()) == [False, False, True]


CASES: tuple[tuple[str, tuple[Fault, ...]], ...] = (
    ("3", (("rank3", "backward", 1), ("leader", "bucket", 8), ("rank1", "reduced", 16))),
    ("3", (("rank2", "forward", 2), ("rank1", "predict", 6), ("rank1", "bucket", 13))),
    ("1", (("leader", "stepped", 5), ("rank1", "bucket", 9), ("rank2", "reduced", 20))),
    ("1", (("rank1", "reduced", 0), ("leader", "predict", 8), ("leader", "backward", 27))),
)


@pytest.mark.parametrize(("accumulate", "faults"), CASES)
def test_workers_may_be_killed_at_any_point(
    accumulate: str, faults: tuple[Fault, ...], tmp_path: Path, plain: Plain
) -> None:
    args = ("--double", "--accumulate", accumulate)
    with run(tmp_path, *args, faults=faults, workers=5) as cluster:
        assert cluster.finish() == 0
        assert len(list(cluster.out.glob("fault-*"))) == 3
        results = cluster.results()
        assert len(results) == 2
        for result in results.values():
            check(result, plain(*args), 1e-12)
            assert result["steps"] == plain(*args)["steps"]


# By batches in a window. The first: before an evaluation, before a checkpoint, at the end of an
# epoch, in its middle, at the end. The second: the first batch of a window, one in its middle, and
# the last one before an evaluation, before a checkpoint, and at the end.
MISSED = {"1": (2, 3, 6, 18, 27), "4": (0, 5, 10, 13, 27)}


@pytest.mark.parametrize("accumulate", MISSED)
def test_workers_that_miss_a_result_go_on_like_the_one_that_has_it(
    accumulate: str, tmp_path: Path, plain: Plain
) -> None:
    """Their callbacks see the same steps, and their logs the same losses, norms and rates."""
    steps, args = MISSED[accumulate], ("--double", "--accumulate", accumulate)
    faults = tuple(("rank1", "reduced", step) for step in steps)
    lose = ("--lose", *map(str, steps))
    with run(tmp_path, *args, *lose, faults=faults, workers=7) as cluster:
        assert cluster.finish() == 0
        results = cluster.results()
        assert len(results) == 2
        for result in results.values():
            check(result, plain(*args), 1e-12)
            assert result["steps"] == plain(*args)["steps"]
        assert cluster.output().count("others are further on in the script") == 5 + 4 + 3 + 2 + 1


BEST = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_ordered",
    "save_steps": 3,
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0},
}


def test_training_stops_early_and_the_best_model_is_loaded(tmp_path: Path, plain: Plain) -> None:
    """The leader is lost while it writes a checkpoint; the next one writes it."""
    args = ("--double", "--patience", "2", "--epochs", "9", "--set", json.dumps(BEST))
    expected = plain(*args)
    assert expected["step"] < 9 * 7
    faults = (("leader", "saving", 5), ("rank1", "bucket", 8))
    with run(tmp_path, *args, faults=faults, workers=4) as cluster:
        assert cluster.finish() == 0
        results = cluster.results()
        assert len(results) == 2
        for result in results.values():
            check(result, expected, 1e-12)
        newest = cluster.out / "elastic" / f"checkpoint-{expected['step']}"
        assert (newest / "trainer_state.json").exists()


def test_alone_it_trains_like_the_original(tmp_path: Path, plain: Plain) -> None:
    args = ("--double", "--accumulate", "3")
    argv: list[str | Path] = [SCRIPT, "--out", tmp_path, *args]
    assert fork_server(*PRELOAD).run(argv, OFFLINE, tmp_path / "log").wait() == 0
    result = torch.load(tmp_path / "alone.pt", weights_only=True)
    check(result, plain(*args), 1e-12)
    assert result["steps"] == plain(*args)["steps"]


def test_under_torchrun_two_processes_train_like_one(tmp_path: Path, plain: Plain) -> None:
    args = ("--double", "--accumulate", "3")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(SCRIPT), "--out", str(tmp_path), *args]
    env = {**ENVIRONMENT, **OFFLINE}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    results = [torch.load(tmp_path / f"alone{rank}.pt", weights_only=True) for rank in (0, 1)]
    for result in results:
        check(result, plain(*args), 1e-12)
    assert [bool(result["writes"]) for result in results] == [True, False]


def test_the_example_trains_under_torchrun(tmp_path: Path) -> None:
    example = SCRIPT.parents[2] / "examples" / "hugging_face.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(example), "--limit", "256", "--output", str(tmp_path)]
    env = {**ENVIRONMENT, **OFFLINE}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"'eval_loss': '([0-9.]+)'", done.stdout)]
    assert len(losses) == 3  # printed by one of them
    assert losses[-1] < losses[0]
    assert (tmp_path / "model.safetensors").exists()


def test_a_worker_that_joins_in_the_middle_of_an_epoch_goes_on_there(
    tmp_path: Path, plain: Plain
) -> None:
    """The leader is lost: one of the others writes from then on, and the joiner has all state."""
    args = ("--double", "--accumulate", "3", "--epochs", "10")
    with run(tmp_path, *args, "--held", workers=3, restarts=1) as cluster:
        status = cluster.until_training(3)
        cluster.until_step(9)
        leader = next(w["worker"] for w in cluster.status()["workers"] if w["rank"] == 0)
        cluster.signal(leader)
        cluster.until_training(3, after=status["generation"])
        assert cluster.finish() == 0
        results = cluster.results()
        assert len(results) == 3
        for result in results.values():
            check(result, plain(*args), 1e-12)
            whole = plain(*args)["steps"]
            assert result["steps"] == whole[len(whole) - len(result["steps"]) :]
        assert sum(bool(result["writes"]) for result in results.values()) == 1
        assert min(len(result["steps"]) for result in results.values()) < len(whole)


@pytest.mark.parametrize(
    ("more", "tolerance"),
    [(("--model", "lora"), 1e-6), (("--set", '{"bf16": true}'), 2e-2), ((), 1e-6)],
    ids=["lora", "bf16", "float32"],
)
def test_single_precision_and_less(
    more: tuple[str, ...], tolerance: float, tmp_path: Path, plain: Plain
) -> None:
    """With the loss of the model itself; in bf16, sums in another order differ visibly."""
    if "lora" in more:
        pytest.importorskip("peft", reason='pip install "evenstep[adapters]"')
    sgd = json.dumps({"optim": "sgd", "bf16": "--set" in more})
    args = ("--accumulate", "3", *more[: 2 * ("lora" in more)], "--set", sgd)
    faults = (("rank1", "bucket", 8),)
    with run(tmp_path, *args, faults=faults, workers=3) as cluster:
        assert cluster.finish() == 0
        results = cluster.results()
        assert len(results) == 2
        for result in results.values():
            check(result, plain(*args), tolerance)


def test_a_new_run_continues_from_a_checkpoint_of_trainer(tmp_path: Path, plain: Plain) -> None:
    """In the middle of an epoch, written by the leader of another run, alone."""
    args = ("--double", "--accumulate", "3", "--set", '{"save_total_limit": 9}')
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with run(tmp_path / "a", *args, workers=2) as cluster:
        assert cluster.finish() == 0
        checkpoint = cluster.out / "elastic" / "checkpoint-4"
        assert (checkpoint / "trainer_state.json").exists()
    resume = (*args, "--resume", str(checkpoint))
    with run(tmp_path / "b", *resume, workers=2) as cluster:
        assert cluster.finish() == 0
        results = cluster.results()
        for result in results.values():
            assert result["steps"] == plain(*args)["steps"][4:]
            assert result["lr"] == plain(*args)["lr"]
            for name, tensor in plain(*args)["model"].items():
                assert float((result["model"][name] - tensor).abs().max()) <= 1e-12, name


def test_a_run_is_resumed_where_it_was_stopped(tmp_path: Path, plain: Plain) -> None:
    args = ["--double", "--accumulate", "3", "--epochs", "10", "--held"]
    options = ["--checkpoint-every", "0.05"]
    with CliRun(tmp_path, workers="2", script=SCRIPT, args=args, options=options) as first:
        first.until_training(2)
        first.until_step(20)
        first.process.send_signal(signal.SIGINT)
        assert first.wait() == 0
    assert not first.results()
    with CliRun(tmp_path, workers="2", script=SCRIPT, args=args, options=options) as second:
        assert second.finish() == 0
        results = second.results()
    assert len(results) == 2
    expected = plain(*args[:-1])
    for result in results.values():
        check(result, expected, 1e-12)
        assert 0 < len(result["steps"]) < len(expected["steps"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp16", True),
        ("torch_compile", True),
        ("auto_find_batch_size", True),
        ("ignore_data_skip", True),
        ("include_num_input_tokens_seen", "all"),
        ("train_sampling_strategy", "group_by_length"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, value: Any) -> None:
    from accelerate.utils import DistributedType

    from evenstep.adapters.hf.arguments import ARGUMENTS, check_arguments

    given = {argument: allowed[0] for argument, allowed, _ in ARGUMENTS}
    check_arguments(SimpleNamespace(n_gpu=0, optim="adamw_torch", **given), DistributedType.NO)
    given[name] = value
    with pytest.raises(ConfigError, match=name):
        check_arguments(SimpleNamespace(n_gpu=0, optim="adamw_torch", **given), DistributedType.NO)


def test_a_process_group_of_ddp_is_refused() -> None:
    from accelerate.utils import DistributedType

    from evenstep.adapters.hf.arguments import check_arguments

    with pytest.raises(ConfigError, match=r"from evenstep\.adapters\.hf import Trainer, Training"):
        check_arguments(SimpleNamespace(), DistributedType.MULTI_CPU)


def test_a_worker_that_joins_within_a_window_takes_the_rest_of_it() -> None:
    """Of the window of three at the end of an epoch, the others have taken the first."""
    import evenstep
    from evenstep.adapters.hf.batches import TrainerBatches

    model = torch.nn.Linear(1, 1)
    with evenstep.join() as session:
        session.prepare(model, torch.optim.SGD(model.parameters()))
        loader = session.loader(torch.arange(52.0)[:, None], batch=8)
        loader.load_state_dict({**loader.state_dict(), "cursor": 40, "index": 5})
        batches = TrainerBatches(loader, accumulate=4)
        assert batches.begin(epoch=0) == 5
        window = batches.take_window(3)
        assert [batch.window for batch in window] == [3, 3]
        assert len(window[0].taken) == 8


def test_gathering_leaves_out_what_was_lost_or_is_there_twice() -> None:
    from evenstep.adapters.gathering import gather

    own = {0: b"zero", 2: b"two", 3: b"three"}
    others = [{1: b"one", 3: b"three"}, {4: b"four"}]  # the second is lost before it sends
    sums = iter(range(2))

    def add_up(mine: torch.Tensor) -> torch.Tensor:
        if next(sums) == 0:
            for other in others:
                for i, data in other.items():
                    mine[i] += torch.tensor([1, len(data) + 1])
        else:
            begin = len(b"zero") + 1
            mine[begin : begin + 4] = torch.frombuffer(bytearray(b"\1one"), dtype=torch.uint8)
        return mine

    assert gather(add_up, own, 6) == {0: b"zero", 1: b"one", 2: b"two"}
