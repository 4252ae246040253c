"""Lightning's Trainer as workers, compared with Trainer in one process."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench.testbed.cli_run import CliRun
from bench.testbed.fork_server import fork_server
from bench.testbed.live_run import Fault
from torch.utils.data import DataLoader

import evenstep
from evenstep.errors import ConfigError
from tests.faults.cluster import Cluster

pytest.importorskip("lightning", reason='pip install "evenstep[lightning]"')

pytestmark = pytest.mark.long  # `make test-long` installs the framework, `make test` does not

SCRIPT = Path(__file__).with_name("lightning_train.py")
PRELOAD = ("evenstep.adapters.lightning",)

Plain = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Train with Lightning alone; cached by arguments."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def train(*args: str) -> dict[str, Any]:
        if args not in known:
            out = tmp_path_factory.mktemp("plain")
            argv: list[str | Path] = [SCRIPT, "--out", out, "--plain", *args]
            forked = fork_server(*PRELOAD).run(argv, {}, out / "log")
            assert forked.wait() == 0, (out / "log").read_text()
            known[args] = torch.load(out / "plain.pt", weights_only=True)
        return known[args]

    return train


def check(result: dict[str, Any], expected: dict[str, Any], *, metrics: float = 1e-9) -> None:
    """Parameters, schedule, counts, metrics and checkpoints are those of one process."""
    check_model(result, expected, 1e-12)
    for name in ("lr", "step", "epoch", "steps", "kept"):
        assert result[name] == expected[name], name
    assert set(result["files"]) == set(expected["files"])
    assert len(result["logged"]) == len(expected["logged"])
    for mine, theirs in zip(result["logged"], expected["logged"], strict=True):
        assert mine == pytest.approx(theirs, rel=metrics)
    assert result["best"] == pytest.approx(expected["best"], rel=1e-9)


def check_model(result: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for name, tensor in expected["model"].items():
        scale = max(1.0, float(tensor.abs().max()))
        error = float((result["model"][name] - tensor).abs().max()) / scale
        assert error <= tolerance, f"{name}: {error:.2g}"


def run(folder: Path, *args: str, faults: tuple[Fault, ...] = (), **more: Any) -> Cluster:
    return Cluster(folder, args=args, faults=faults, script=SCRIPT, preload=PRELOAD, **more)


def accumulating(num: int, **more: Any) -> tuple[str, str]:
    """Windows that do not fill the epoch, clipping, and validation within epochs."""
    arguments = {"accumulate_grad_batches": num, "gradient_clip_val": 0.05}
    return "--set", json.dumps({**arguments, "val_check_interval": 3, **more})


@pytest.mark.parametrize(
    "args",
    [
        accumulating(3),
        ("--scheduler", "epoch"),
        ("--scheduler", "plateau", "--stop"),
        ("--game",),
        accumulating(2, max_steps=7),
        ("--set", '{"limit_train_batches": 4, "limit_val_batches": 5}'),
    ],
    ids=["accumulate", "epoch", "plateau", "game", "max_steps", "limits"],
)
def test_three_workers_train_like_one_process(
    args: tuple[str, ...], tmp_path: Path, plain: Plain
) -> None:
    """With clipping, schedules, validation, logs and checkpoints."""
    with run(tmp_path, *args, workers=3) as cluster:
        assert cluster.finish() == 0
        results = cluster.results()
        assert len(results) == 3
        for result in results.values():
            check(result, plain(*args))
        assert sorted(result["wrote"] for result in results.values()) == [False, False, True]


CASES: tuple[tuple[tuple[str, ...], tuple[Fault, ...]], ...] = (
    (
        accumulating(3),
        (("rank3", "backward", 1), ("leader", "bucket", 8), ("rank1", "reduced", 16)),
    ),
    (accumulating(3), (("rank2", "forward", 2), ("rank1", "predict", 5), ("rank1", "bucket", 13))),
    (("--scheduler", "epoch"), (("leader", "stepped", 6), ("rank1", "bucket", 9))),
    (("--scheduler", "plateau"), (("rank1", "reduced", 0), ("leader", "predict", 6))),
    (("--game",), (("rank1", "between", 4), ("leader", "backward", 9), ("rank1", "bucket", 20))),
)


@pytest.mark.parametrize(("args", "faults"), CASES)
def test_workers_may_be_killed_at_any_point(
    args: tuple[str, ...], faults: tuple[Fault, ...], tmp_path: Path, plain: Plain
) -> None:
    with run(tmp_path, *args, faults=faults, workers=5) as cluster:
        assert cluster.finish() == 0
        assert len(list(cluster.out.glob("fault-*"))) == len(faults)
        results = cluster.results()
        assert len(results) == 5 - len(faults)
        # What was logged by a worker that is lost after its gradients were sent is missing.
        metrics = 0.3 if any(point == "reduced" for _, point, _ in faults) else 1e-9
        for result in results.values():
            check(result, plain(*args), metrics=metrics)


@pytest.mark.parametrize("args", [(*accumulating(3), "--unsynced"), ("--scheduler", "epoch")])
def test_workers_that_miss_a_result_take_over_the_state_of_the_one_that_has_it(
    args: tuple[str, ...], tmp_path: Path, plain: Plain
) -> None:
    """In the middle and at the end of a window, before validation and at the end of an epoch."""
    steps = (1, 5, 13)
    faults = tuple(("rank1", "reduced", step) for step in steps)
    lose = ("--lose", *map(str, steps))
    with run(tmp_path, *args, *lose, faults=faults, workers=6) as cluster:
        assert cluster.finish() == 0
        results = cluster.results()
        assert len(results) == 3
        assert "pretended" in cluster.output()
        is_overtaken = "others are further on in the script" in cluster.output()
        assert is_overtaken == ("--unsynced" in args)  # else a sum brings workers together
        for result in results.values():
            check(result, plain(*args), metrics=0.3)


def test_a_worker_that_joins_in_the_middle_of_an_epoch_goes_on_there(
    tmp_path: Path, plain: Plain
) -> None:
    """The leader is lost: one of the others writes from then on, and the joiner has all state."""
    args = accumulating(3, max_epochs=10)
    with run(tmp_path, *args, "--held", workers=3, restarts=1) as cluster:
        status = cluster.until_training(3)
        cluster.until_step(9)
        leader = next(w["worker"] for w in cluster.status()["workers"] if w["rank"] == 0)
        cluster.signal(leader)
        cluster.until_training(3, after=status["generation"])
        assert cluster.finish() == 0
        results, expected = cluster.results(), plain(*args)
        assert len(results) == 3
        for result in results.values():
            for name in ("steps", "logged"):  # those of a joiner are the last ones
                whole = expected[name]
                result[name] = whole[: len(whole) - len(result[name])] + result[name]
            check(result, expected)
        assert sum(result["wrote"] for result in results.values()) == 1


def test_workers_that_leave_and_spares_that_come_back_end_like_the_others(
    tmp_path: Path, plain: Plain
) -> None:
    """SIGTERM is a notice; a spare's loop goes on where the run is, an epoch later."""
    args = accumulating(3, max_epochs=16)
    more: Any = {"workers": 3, "max_workers": 3, "spares": 1}
    with run(tmp_path, *args, "--held", **more) as cluster:
        status = cluster.until_training(3)
        for ahead in (9, 2):
            cluster.ask("scale", num_workers=2)
            status = cluster.until_training(2, after=status["generation"])
            cluster.until_step(status["step"] + ahead)
            cluster.ask("scale", num_workers=3)
            status = cluster.until_training(3, after=status["generation"])
        leader = next(w["worker"] for w in cluster.status()["workers"] if w["rank"] == 0)
        cluster.ask("scale", num_workers=2)
        cluster.signal(leader, signal.SIGTERM)
        assert cluster.finish() == 0
        results, expected = cluster.results(), plain(*args)
        assert results
        for result in results.values():
            check_model(result, expected, 1e-12)
            assert result["steps"][-1] == expected["steps"][-1]
            assert all(step in expected["steps"] for step in result["steps"])
            assert result["lr"] == expected["lr"]


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("32-true", 1e-6), ("bf16-mixed", 2e-2)], ids=["float32", "bf16"]
)
def test_single_precision_and_less(
    precision: str, tolerance: float, tmp_path: Path, plain: Plain
) -> None:
    """In bf16, sums in another order differ visibly."""
    args = accumulating(3, precision=precision)
    with run(tmp_path, *args, faults=(("rank1", "bucket", 8),), workers=3) as cluster:
        assert cluster.finish() == 0
        results = cluster.results()
        assert len(results) == 2
        for result in results.values():
            check_model(result, plain(*args), tolerance)


@pytest.mark.parametrize("file", ["step=3.ckpt", "step=6.ckpt"])
def test_a_new_run_continues_from_a_checkpoint_of_lightning(
    file: str, tmp_path: Path, plain: Plain
) -> None:
    """At the end of an epoch and in the middle of one, written by the leader of another run."""
    args = accumulating(3)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with run(tmp_path / "a", *args, workers=2) as cluster:
        assert cluster.finish() == 0
        checkpoint = cluster.out / "elastic" / "every" / file
    with run(tmp_path / "b", *args, "--resume", str(checkpoint), workers=2) as cluster:
        assert cluster.finish() == 0
        expected = plain(*args)
        for result in cluster.results().values():
            check_model(result, expected, 1e-6)  # Lightning loads doubles into floats
            whole = [step for step in expected["steps"] if step[2] > int(file[5])]
            assert result["steps"][-len(whole) :] == whole
            assert result["lr"] == expected["lr"]


def test_a_run_is_resumed_where_it_was_stopped(tmp_path: Path, plain: Plain) -> None:
    args = accumulating(3, max_epochs=10)
    options = ["--checkpoint-every", "0.05"]
    held: Any = [*args, "--held"]
    with CliRun(tmp_path, workers="2", script=SCRIPT, args=held, options=options) as first:
        first.until_training(2)
        first.until_step(20)
        first.process.send_signal(signal.SIGINT)
        assert first.wait() == 0
    assert not first.results()
    with CliRun(tmp_path, workers="2", script=SCRIPT, args=held, options=options) as second:
        assert second.finish() == 0
        results = second.results()
    assert len(results) == 2
    expected = plain(*args)
    for result in results.values():
        assert 0 < len(result["steps"]) < len(expected["steps"])
        for name in ("steps", "logged"):
            whole = expected[name]
            result[name] = whole[: len(whole) - len(result[name])] + result[name]
        check(result, expected)


def trainer(**given: Any) -> SimpleNamespace:
    plugin = SimpleNamespace(precision_plugin=None)
    defaults = {"reload_dataloaders_every_n_epochs": 0, "_val_check_time_interval": None}
    return SimpleNamespace(strategy=plugin, **{**defaults, **given})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        ({"_val_check_time_interval": 60.0}, "val_check_interval"),
    ],
)
def test_arguments_of_trainer_that_do_not_go_are_refused_by_name(
    given: dict[str, Any], name: str
) -> None:
    from evenstep.adapters.lightning.wrong_use import check_trainer

    check_trainer(trainer())
    with pytest.raises(ConfigError, match=name):
        check_trainer(trainer(**given))


def test_optimizers_callbacks_and_logged_objects_that_do_not_go_are_refused_by_name() -> None:
    from lightning.pytorch.callbacks import EarlyStopping, WeightAveraging
    from torchmetrics import MeanMetric

    from evenstep.adapters.lightning.logged import check_value
    from evenstep.adapters.lightning.wrong_use import check_callbacks, check_optimizers

    with pytest.raises(ConfigError, match="LBFGS"):
        check_optimizers([torch.optim.LBFGS([torch.zeros(1, requires_grad=True)])])
    with pytest.raises(ConfigError, match="torchmetrics"):
        check_value({"name": "mean", "value": MeanMetric()})
    check_callbacks([EarlyStopping("loss")])
    with pytest.raises(ConfigError, match="WeightAveraging"):
        check_callbacks([WeightAveraging()])


def test_loaders_that_cannot_be_shared_out_are_refused_by_name() -> None:
    from evenstep.adapters.gathering import ordered_batches
    from evenstep.adapters.lightning.batches import make_loader

    numbers: Any = list(range(8))
    with evenstep.join() as session:
        for loader in ([1, 2], DataLoader(numbers, batch_size=None), DataLoader(iter(numbers))):
            with pytest.raises(ConfigError, match="train_dataloader"):
                make_loader(session, loader, None)
    with pytest.raises(ConfigError, match=r"val_dataloader: .*shuffle=False"):
        ordered_batches(DataLoader(numbers, shuffle=True), "val_dataloader", "give shuffle=False")


def test_values_of_all_workers_are_weighted_by_their_samples() -> None:
    from evenstep.adapters.lightning.logged import of_all_workers

    def call(name: str, value: float, how: str) -> dict[str, Any]:
        tensor = torch.tensor(value)
        sizes = {"batch_size": None, "sync_dist": True}
        return {"name": name, "value": tensor, "reduce_fx": how, **sizes}

    def add_up(own: torch.Tensor) -> torch.Tensor:
        assert own.tolist() == [[6.0, 3.0], [4.0, 3.0]]
        return own + torch.tensor([[1.0, 1.0], [5.0, 1.0]])

    calls = of_all_workers(add_up, 3, [call("a", 2.0, "mean"), call("b", 4.0, "sum")])
    assert [(float(c["value"]), c["batch_size"]) for c in calls] == [(1.75, 4), (9.0, 4)]
    with pytest.raises(ConfigError, match="max"):
        of_all_workers(add_up, 3, [call("c", 1.0, "max")])
