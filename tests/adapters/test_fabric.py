"""A loop of Lightning's Fabric as workers, compared with Fabric in one process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.testbed.cli_run import ENVIRONMENT, CliRun
from bench.testbed.fork_server import fork_server
from bench.testbed.live_run import Fault
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.errors import ConfigError, EvenstepError
from tests.faults.cluster import Cluster

pytest.importorskip("lightning", reason='pip install "evenstep[lightning]"')

from lightning.fabric import Fabric

from evenstep.adapters.lightning import FabricStrategy, Strategy
from evenstep.adapters.lightning.schedulers import schedulers_of

# Lightning warns if Slurm's commands are there and not used.
pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command")

SCRIPT = Path(__file__).with_name("fabric_train.py")
PRELOAD = ("evenstep.adapters.lightning", "lightning.fabric")
DOUBLE, SINGLE = 1e-12, 1e-6  # tolerances, by precision

Plain = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Results of Fabric in one process, by arguments."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def result(*args: str) -> dict[str, Any]:
        if args not in known:
            out = tmp_path_factory.mktemp("plain")
            argv: list[str | Path] = [SCRIPT, "--out", out, "--plain", *args]
            code = fork_server(*PRELOAD).run(argv, {}, out / "log").wait()
            assert code == 0, (out / "log").read_text()
            known[args] = {**torch.load(out / "plain.pt"), "out": out}
        return known[args]

    return result


def close(model: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for name, tensor in expected.items():
        assert float((model[name] - tensor).abs().max()) <= tolerance, name


def check(run: Path, result: dict[str, Any], plain: dict[str, Any], tolerance: float) -> None:
    """Parameters, learning rate and evaluation of a worker, and the files of the run."""
    close(result["model"], plain["model"], tolerance)
    assert result["lr"] == pytest.approx(plain["lr"], rel=1e-12)
    num = len(result["evaluated"])
    assert result["evaluated"] == pytest.approx(plain["evaluated"][-num:], rel=10 * tolerance)
    for rows, expected in zip(result["gathered"], plain["gathered"][-num:], strict=True):
        assert sorted(rows) == pytest.approx(sorted(expected), rel=1e3 * tolerance)
    for file in plain["out"].glob("*.ckpt"):
        saved = torch.load(run / file.name)
        close(saved["model"], torch.load(file)["model"], tolerance)


def run(folder: Path, *args: str, faults: tuple[Fault, ...] = (), workers: int) -> Cluster:
    return Cluster(
        folder, args=args, faults=faults, script=SCRIPT, preload=PRELOAD, workers=workers
    )


KILLS: tuple[Any, ...] = (
    (("rank3", "bucket", 1), ("leader", "backward", 6), ("rank1", "reduced", 17)),
    (("rank1", "forward", 0), ("rank2", "backward", 9), ("leader", "bucket", 29)),
    (("leader", "saving", 10), ("leader", "saved", 20), ("rank1", "saving", 30)),
    (("rank1", "predict", 10), ("leader", "predict", 20), ("rank2", "predict", 30)),
)


@pytest.mark.long
@pytest.mark.parametrize("faults", KILLS)
def test_workers_are_killed_in_windows_and_while_a_checkpoint_is_written(
    faults: tuple[Fault, ...], tmp_path: Path, plain: Plain
) -> None:
    with run(tmp_path, faults=faults, workers=5) as cluster:
        assert cluster.finish() == 0
        assert len(cluster.results()) == 2
        for result in cluster.results().values():
            check(cluster.out, result, plain(), DOUBLE)


@pytest.mark.long
def test_workers_miss_results(tmp_path: Path, plain: Plain) -> None:
    """Of the first, a middle and the last batch of a window, and the last of an epoch."""
    steps = (4, 6, 13, 19)
    faults = tuple(("rank1", "reduced", step) for step in steps)
    with run(tmp_path, "--lose", *map(str, steps), faults=faults, workers=6) as cluster:
        assert cluster.finish() == 0
        assert len(cluster.results()) == 2
        for result in cluster.results().values():
            check(cluster.out, result, plain(), DOUBLE)


@pytest.mark.long
def test_single_precision(tmp_path: Path, plain: Plain) -> None:
    args = ("--precision", "32-true")
    with run(tmp_path, *args, faults=(("rank1", "bucket", 8),), workers=3) as cluster:
        assert cluster.finish() == 0
        for result in cluster.results().values():
            check(cluster.out, result, plain(*args), SINGLE)


@pytest.mark.long
def test_losses_and_collectives_are_those_of_all_workers(tmp_path: Path, plain: Plain) -> None:
    with run(tmp_path, workers=3) as cluster:
        assert cluster.finish() == 0
        results = cluster.results().values()
        assert sorted(result["leads"] for result in results) == [False, False, True]
        for result in results:
            assert result["losses"] == pytest.approx(plain()["losses"], rel=1e-12)
            for rows, expected in zip(result["gathered"], plain()["gathered"], strict=True):
                assert rows == pytest.approx(expected, rel=1e-9)  # in the same order
            assert result["told"] == [[3.0, [0, 1, 2], 0]] * 3


@pytest.mark.long
def test_two_processes_under_torchrun(tmp_path: Path, plain: Plain) -> None:
    """They end as scripts do: nobody tells Fabric."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(SCRIPT), "--out", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        result = torch.load(tmp_path / f"alone{rank}.pt")
        check(tmp_path, result, plain(), DOUBLE)
        assert result["losses"] == pytest.approx(plain()["losses"], rel=1e-12)


REFUSED = {
    "counted": ((), "steps an optimizer every 4 batches"),
    "early": ((("rank2", "backward", 12),), "a loop was left after 7 iterations, of which 1 had"),
}


@pytest.mark.long
@pytest.mark.parametrize("loop", REFUSED)
def test_loops_that_count_by_themselves_are_refused_by_name(loop: str, tmp_path: Path) -> None:
    faults, told = REFUSED[loop]
    with run(tmp_path, "--loop", loop, faults=faults, workers=3) as cluster:
        assert cluster.finish() != 0
        assert told in cluster.output()
        assert "for i, batch in fabric.strategy.enumerate(loader)" in cluster.output()
        assert not (cluster.out / "epoch-1.ckpt").exists()


@pytest.mark.long
def test_a_script_that_ends_or_fails_without_telling_fabric(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SHORT)
    for argument, code in (("", 0), ("fail", 1)):
        folder = tmp_path / f"run{argument}"
        folder.mkdir()
        with CliRun(folder, workers="2", script=script, args=[argument]) as cluster:
            assert cluster.wait() == code
            output = cluster.output()
            assert ("trained to the end" in output) is (code == 0)
            assert ("ValueError: an error of the script" in output) is (code == 1)


@pytest.mark.long
def test_a_worker_that_leaves_is_not_one_that_has_trained_to_the_end(tmp_path: Path) -> None:
    """Else the run would end with it."""
    script = tmp_path / "train.py"
    script.write_text(SHORT)
    with CliRun(tmp_path, workers="2", script=script, args=["endless"]) as cluster:
        cluster.until_training(2)
        cluster.signal("w1", signal.SIGTERM)
        step = cluster.until_training(1, after=1)["step"]
        cluster.until(lambda status: all(w["worker"] != "w1" for w in status["workers"]))
        cluster.until_step(step + 100)


SHORT = """
import sys, torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset
from evenstep.adapters.lightning import FabricStrategy

fabric = Fabric(accelerator="cpu", strategy=FabricStrategy())
fabric.launch()
model = torch.nn.Linear(2, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(64, 2)), batch_size=8))
for _ in range(10**9 if "endless" in sys.argv else 1):
    for (x,) in loader:
        fabric.backward(model(x).mean())
        optimizer.step()
        if "fail" in sys.argv:
            raise ValueError("an error of the script")
"""


# One process: the small part, which `make test` runs where Lightning is installed.


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=FabricStrategy())
    fabric.launch()
    yield fabric
    strategy: Any = fabric.strategy
    strategy.teardown()


def ones(num: int) -> Any:
    """As a dataset."""
    return torch.ones(num, 1)


def trained(fabric: Fabric, sampler: list[int] | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(50, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    net = nn.Linear(8, 1)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader, test_loader = fabric.setup_dataloaders(
        DataLoader(data, batch_size=8, sampler=sampler), DataLoader(data, batch_size=8)
    )
    for _ in range(2):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.mse_loss(model(x), y))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            loss = torch.stack([nn.functional.mse_loss(model(x), y) for x, y in test_loader])
    return {"loss": loss, **net.state_dict()}


def test_one_process_trains_as_fabric_does(fabric: Fabric) -> None:
    expected = trained(Fabric(accelerator="cpu", devices=1))
    close(trained(fabric), expected, 0.0)
    assert fabric.is_global_zero
    assert fabric.world_size == 1


def test_collectives_of_one_process(fabric: Fabric) -> None:
    trained(fabric)
    assert float(fabric.all_reduce(torch.tensor(3.0))) == 3.0
    assert fabric.broadcast({"a": torch.ones(2)})["a"].tolist() == [1.0, 1.0]
    strategy: Any = fabric.strategy
    assert strategy.reduce_boolean_decision(True)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: fabric.all_reduce(torch.ones(1), reduce_op="max"), "reduce_op"),
        (lambda: fabric.all_gather(torch.ones(1), sync_grads=True), r"session\.gather"),
        (lambda: fabric.broadcast(1, src=1), "src=1"),
    ]
    for call, name in calls:
        with pytest.raises(ConfigError, match=name):
            call()


def test_the_position_in_the_data_is_saved_with_a_loader(fabric: Fabric, tmp_path: Path) -> None:
    net = nn.Linear(1, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loader: Any = fabric.setup_dataloaders(DataLoader(ones(6), batch_size=2))
    seen = []
    for i, batch in fabric.strategy.enumerate(loader):
        fabric.backward(model(batch).mean())
        optimizer.step()
        if i == 1:
            fabric.save(tmp_path / "saved.ckpt", {"loader": loader})
    again = Fabric(accelerator="cpu", devices=1, strategy=FabricStrategy())
    again.launch()
    net = nn.Linear(1, 1)
    model, optimizer = again.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loader = again.setup_dataloaders(DataLoader(ones(6), batch_size=2))
    again.load(tmp_path / "saved.ckpt", {"loader": loader})
    for i, batch in again.strategy.enumerate(loader):
        again.backward(model(batch).mean())
        seen.append(i)
    again.strategy.teardown()
    assert seen == [2]


def two_loaders(fabric: Fabric) -> None:
    net = nn.Linear(1, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for loader in fabric.setup_dataloaders(*[DataLoader(ones(2)) for _ in range(2)]):
        for batch in loader:
            fabric.backward(model(batch).mean())
            optimizer.step()


def late_setup(fabric: Fabric) -> None:
    trained(fabric)
    fabric.setup(nn.Linear(1, 1))


def sum_of_whole_evaluations(fabric: Fabric) -> None:
    trained(fabric)
    assert float(fabric.all_reduce(torch.tensor(3.0))) == 3.0
    fabric.all_reduce(torch.tensor(3.0), reduce_op="sum")


def evaluation_without_gather(fabric: Fabric) -> None:
    trained(fabric)
    loader = fabric.setup_dataloaders(DataLoader(ones(4), batch_size=2))
    for _ in fabric.strategy.evaluate(loader):
        pass


def gather_of_means(fabric: Fabric) -> None:
    trained(fabric)
    loader = fabric.setup_dataloaders(DataLoader(ones(4), batch_size=2))
    for batch in fabric.strategy.evaluate(loader):
        fabric.strategy.gather_for_metrics(batch.mean())


def no_training_loop(fabric: Fabric) -> None:
    net = nn.Linear(1, 1)
    model = fabric.setup(net).eval()
    for batch in fabric.setup_dataloaders(DataLoader(ones(2))):
        fabric.backward(model(batch).mean())


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (two_loaders, r"a second DataLoader .* call model.eval\(\) before the loop"),
        (late_setup, "set up all before it"),
        (sum_of_whole_evaluations, "Leave it out, the number is complete"),
        (evaluation_without_gather, r"fabric.strategy.gather_for_metrics\(\(predictions, labels"),
        (gather_of_means, "got a tensor of .* but this worker has 2 samples of the batch"),
        (no_training_loop, r"call model.train\(\) before the loop"),
    ],
)
def test_wrong_use_is_refused_by_name(
    use: Callable[[Fabric], None], told: str, fabric: Fabric
) -> None:
    with pytest.raises(EvenstepError, match=told):
        use(fabric)


def test_setup_before_launch_is_refused_by_name() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=FabricStrategy())
    with pytest.raises(ConfigError, match=r"call fabric.launch\(\) first"):
        fabric.setup(nn.Linear(1, 1))


def test_the_strategy_of_trainer_names_that_of_fabric() -> None:
    with pytest.raises(ValueError, match="FabricStrategy"):
        Fabric(strategy=Strategy())


def test_schedulers_are_found_in_one_order() -> None:
    optimizers: list[torch.optim.Optimizer]
    optimizers = [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1) for _ in range(2)]
    first, second = optimizers
    kinds = torch.optim.lr_scheduler
    steps = kinds.StepLR(second, 1)
    plateau = kinds.ReduceLROnPlateau(first)
    warmup, decay = kinds.ConstantLR(first), kinds.CosineAnnealingLR(first, 9)
    both = kinds.SequentialLR(first, [warmup, decay], [3])
    assert schedulers_of(optimizers) == [plateau, both, steps]
    other = kinds.StepLR(second, 2)
    with pytest.raises(ConfigError, match="two of StepLR for one optimizer"):
        schedulers_of(optimizers)
    del other
