"""What a host that shards its model cannot do is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset

from evenstep.adapters import fsdp
from evenstep.errors import ConfigError
from evenstep.launch.ranks import StaticRank
from evenstep.train.comm.host import Host
from evenstep.train.comm.model_check import model_digest
from evenstep.train.job import Job, Options
from evenstep.train.roster.fixed import FixedRoster
from evenstep.train.session import Session
from evenstep.train.wrong_use import check_shards
from tests.train.test_wrong_use import own_group


@pytest.fixture
def two_processes() -> Iterator[None]:
    """The process group of a host, without its other process."""
    with own_group("fake", FakeStore(), 2):
        yield


def refused(model: nn.Module) -> str:
    with pytest.raises(ConfigError) as caught:
        check_shards(model, 2)
    return str(caught.value)


@pytest.mark.usefixtures("two_processes")
def test_models_that_are_not_sharded_over_the_host_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert "0.weight (4, 4) is not sharded" in refused(model)
    fully_shard(model[1])
    assert "0.weight (4, 4) is not sharded" in refused(model)
    fully_shard(model)
    check_shards(model, 2)
    over_both = nn.Linear(4, 4)
    fully_shard(over_both, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("over", "within")))
    assert "must be sharded over the 2 processes" in refused(over_both)


@pytest.mark.usefixtures("two_processes")
def test_running_statistics_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    fully_shard(model)
    assert "1 keeps running statistics" in refused(model)


@pytest.mark.usefixtures("two_processes")
def test_a_host_with_another_number_of_processes_has_another_model() -> None:
    whole, sharded = nn.Linear(4, 4), nn.Linear(4, 4)
    fully_shard(sharded)
    assert model_digest(whole) != model_digest(sharded)


def test_a_host_needs_a_coordinator_and_other_processes() -> None:
    with pytest.raises(ConfigError, match="evenstep run --workers 1"):
        fsdp.join(processes=2)
    with pytest.raises(ConfigError, match="processes"):
        fsdp.join(processes=1)
    with pytest.raises(ConfigError, match="at most 16"):
        fsdp.join(processes=17)


def test_what_is_not_there_for_sharded_models_is_refused() -> None:
    job = Job(Options(), Host(rank=0, size=2))
    with Session(job, FixedRoster(StaticRank(), job)) as session:
        with pytest.raises(ConfigError, match=r"session\.evaluation"):
            session.evaluation(TensorDataset(torch.zeros(4)), batch_size=2)
        with pytest.raises(ConfigError, match=r"session\.gather"):
            session.gather(torch.zeros(2, 3))
        with pytest.raises(ConfigError, match="GradScaler"):
            session.register("scaler", torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("end", [5, 6, 11])
def test_the_parts_of_a_host_make_up_its_share(size: int, end: int) -> None:
    parts = [Host(rank=rank, size=size).part(5, end) for rank in range(size)]
    samples = [sample for begin, until in parts for sample in range(begin, until)]
    assert samples == list(range(5, end))
