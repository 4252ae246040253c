"""What would train wrongly in silence, around the session or beside it, is refused by name."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.testbed.fork_server import fork_server
from torch import distributed, nn
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset

from evenstep.errors import ConfigError
from evenstep.launch.environment import CoordinatorAddress, torchrun_variables
from evenstep.train.comm.forks import never_freed_in_forks
from evenstep.train.join import elastic_session
from evenstep.train.optimizers import skip_void_steps
from evenstep.train.session import Session
from evenstep.train.step import Step
from tests.coordinate.hosted import hosted
from tests.train.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by DDP itself

DATA = TensorDataset(torch.randn(16, 4))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


@contextmanager
def own_group(backend: str, store: Store, world: int) -> Iterator[None]:
    """A process group that the script has made itself."""
    hook = sys.excepthook
    distributed.init_process_group(backend, store=store, rank=0, world_size=world)
    yield
    # DTensor's cache of this thread keeps groups. A process that another thread forks frees the
    # cache, and with it the groups, whose destructors would wait for threads that it does not have.
    for group in distributed.distributed_c10d._world.pg_map:
        never_freed_in_forks(group)
    distributed.destroy_process_group()
    sys.excepthook = hook  # torch leaves one that puts the rank before every line


@pytest.fixture
def process_group() -> Iterator[None]:
    with own_group("gloo", HashStore(), 1):
        yield


def refused(body: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        run_ranks(1, body)
    return str(caught.value)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("what", ["model", "compiled", "part", "one of several"])
def test_ddp_around_a_prepared_model_is_refused(what: str) -> None:
    def body(session: Session) -> None:
        model = network()
        if what == "one of several":
            session.prepare(nn.ModuleList([model, network()]))
        else:
            session.prepare(model)
        wrapped = {"compiled": torch.compile(model), "part": model[0]}.get(what, model)
        DistributedDataParallel(wrapped)

    assert "reduced twice" in refused(body)


@pytest.mark.usefixtures("process_group")
def test_ddp_is_refused_around_inside_and_behind_the_model_that_is_given() -> None:
    wrapped = DistributedDataParallel(network())
    assert "is wrapped in DDP" in refused(lambda session: session.prepare(wrapped))
    inside = nn.Sequential(wrapped)
    assert "0 is wrapped in DDP" in refused(lambda session: session.prepare(inside))
    assert "is wrapped in DDP" in refused(lambda session: session.prepare(wrapped.module))


@pytest.mark.usefixtures("process_group")
def test_ddp_works_on_copies_and_once_the_session_is_closed() -> None:
    model, saved = network(), io.BytesIO()

    def body(session: Session) -> nn.Module:
        session.prepare(model)
        torch.save(model, saved)
        return copy.deepcopy(model)

    [copied] = run_ranks(1, body)
    saved.seek(0)
    for free in (copied, torch.load(saved, weights_only=False), model):
        DistributedDataParallel(free)


def test_a_prepared_model_compiles_to_one_graph() -> None:
    def body(session: Session) -> None:
        model = session.prepare(network())
        compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
        compiled(torch.ones(2, 4))

    run_ranks(1, body)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("part", "name"), [(None, "it"), (1, "1")])
def test_a_model_that_is_sharded_after_it_was_prepared_is_refused(
    part: int | None, name: str
) -> None:
    def body(session: Session) -> None:
        model = network()
        session.prepare(model, SGD(model.parameters()))
        loader = session.loader(DATA, batch=4)
        fully_shard(model if part is None else model[part])
        next(iter(loader))

    assert f"{name} was sharded by FSDP after session.prepare" in refused(body)


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")  # it has one process
@pytest.mark.usefixtures("process_group")
def test_sharded_models_are_refused_by_the_name_of_the_part() -> None:
    mesh = init_device_mesh("cpu", (1,))
    second = network()
    fully_shard(second[1], mesh=mesh)
    assert "1 is sharded by FSDP" in refused(lambda session: session.prepare(second))
    first = nn.Sequential(FullyShardedDataParallel(network(), device_id=torch.device("cpu")))
    assert "0 is sharded by FSDP" in refused(lambda session: session.prepare(first))
    placed = network()
    placed[0].bias = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    assert "0.bias is a DTensor" in refused(lambda session: session.prepare(placed))


class Wrapper:
    """As Accelerate, Lightning, DeepSpeed and Apex have them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class WrapperByType(Wrapper, torch.optim.Optimizer):
    """One that passes for an optimizer, as Accelerate's does."""


@pytest.mark.parametrize("kind", [Wrapper, WrapperByType])
def test_a_wrapped_optimizer_is_refused(kind: type[Wrapper]) -> None:
    model = network()
    wrapper = kind(SGD(model.parameters()))
    says = f"{kind.__name__} wraps SGD: give that one, its attribute `optimizer`"
    assert says in refused(lambda session: session.prepare(model, wrapper))
    assert says in refused(lambda session: session.register("optimizer", wrapper))


@pytest.mark.parametrize("others", [0, 1])
def test_a_step_of_an_optimizer_that_was_not_given_is_refused_at_once(others: int) -> None:
    def body(session: Session) -> None:
        model = network()
        session.prepare(model, *(SGD(model.parameters()) for _ in range(others)))
        optimizer = Wrapper(SGD(model.parameters()))
        for (x,) in session.loader(DATA, batch=8):
            model(x).mean().backward()
            optimizer.step()

    assert "SGD has parameters of the model, but was not given to session.prepare" in refused(body)


def test_optimizers_inside_one_that_was_given_or_of_another_model_may_step() -> None:
    class Inside(SGD):
        def step(self, closure: Any = None) -> Any:
            return inner.step(closure)

    model, other = network(), nn.Linear(1, 1)
    inner = SGD(model.parameters())

    def body(session: Session) -> None:
        optimizer, unrelated = Inside(model.parameters()), SGD(other.parameters())
        session.prepare(model, optimizer)
        for (x,) in session.loader(DATA, batch=8):
            model(x).mean().backward()
            optimizer.step()
            unrelated.step()

    run_ranks(1, body)
    inner.step()  # after the session


SECOND = """
import sys, torch
from torch import nn
from torch.utils.data import TensorDataset
import evenstep

with evenstep.join() as session:
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer, unrelated = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    session.prepare(model, optimizer)
    if "before" in sys.argv:  # no batch is in hand: a warm-up, say
        other(torch.ones(1, 4)).sum().backward()
        unrelated.step()
        unrelated.zero_grad()
    for (x,) in session.loader(TensorDataset(torch.randn(16, 4)), batch=8):
        model(x).mean().backward()
        if "before" not in sys.argv:
            other(x).mean().backward()
        optimizer.step()
        unrelated.step()
        unrelated.zero_grad()
"""


@pytest.mark.parametrize(
    ("world", "arguments", "num_warnings"), [(2, [], 1), (1, [], 0), (2, ["before"], 0)]
)
def test_the_leader_warns_once_of_another_model_that_every_rank_trains_by_itself(
    tmp_path: Path, world: int, arguments: list[str], num_warnings: int
) -> None:
    """In processes: hooks on optimizers are those of a process."""
    script, log, shared = tmp_path / "script.py", tmp_path / "log", torchrun_variables(world)
    script.write_text(SECOND)
    ranks = [
        fork_server().run([script, *arguments], {**shared, "RANK": str(rank)}, log)
        for rank in range(world)
    ]
    assert [rank.wait() for rank in ranks] == [0] * world, log.read_text()
    said = "SGD steps on parameters that are not in the model given to session.prepare: each of"
    assert log.read_text().count(said) == num_warnings


def elastic(tmp_path: Path, body: Any) -> None:
    with hosted(tmp_path / "run") as run:
        where = CoordinatorAddress(host=run.name, port=run.port, token=run.token)
        with elastic_session(where) as session:
            body(session)


def test_a_scheduler_made_after_the_first_batch_is_refused(tmp_path: Path) -> None:
    def body(session: Session) -> None:
        model = network()
        optimizer = SGD(model.parameters())
        session.prepare(model, optimizer)
        for (x,) in session.loader(DATA, batch=8):
            model(x).mean().backward()
            optimizer.step()
            with pytest.raises(ConfigError, match="scheduler: make it before the first batch"):
                StepLR(optimizer, 1)

    elastic(tmp_path, body)


def test_a_step_that_is_guarded_twice_passes_both_guards() -> None:
    optimizer, seen = SGD(network().parameters()), list[str]()
    releases = [
        skip_void_steps(Step(), [optimizer], partial(seen.append, name), lambda _: None)
        for name in ("in", "out")
    ]
    optimizer.step()
    assert seen == ["out", "in"]
    for release in reversed(releases):
        release()
    assert "step" not in vars(optimizer)


def test_a_process_group_of_several_is_refused_in_an_elastic_run(tmp_path: Path) -> None:
    def body(session: Session) -> None:
        session.prepare(network())
        next(iter(session.loader(DATA, batch=8)))

    with (
        own_group("fake", FakeStore(), 2),
        pytest.raises(ConfigError, match="a process group of 2"),
    ):
        elastic(tmp_path, body)


@pytest.mark.usefixtures("process_group")
def test_a_process_group_of_one_is_accepted_in_an_elastic_run(tmp_path: Path) -> None:
    def body(session: Session) -> None:
        model = session.prepare(network())
        (x,) = next(iter(session.loader(DATA, batch=8)))
        model(x).mean().backward()

    elastic(tmp_path, body)
