"""The reduced gradient is the union batch's, whatever the shares; each sample once an epoch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from evenstep.train.session import Session
from tests.train.ranks import run_ranks


def data(num: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    make = torch.Generator().manual_seed(1)
    x = torch.randn(num, 6, generator=make, dtype=dtype)
    return TensorDataset(x, (x.sum(1, keepdim=True) * 0.3).tanh(), torch.arange(num))


# Made once: ranks are threads here and would race for torch's one random state.
torch.manual_seed(3)  # rounding grows with the steps, by how much is a matter of the start
TEMPLATE = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    return copy.deepcopy(TEMPLATE).to(dtype)


def alone(num: int, batch: int, epochs: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Parameters after training in one process on the same order."""

    def body(session: Session) -> list[torch.Tensor]:
        return train(session, num, batch, epochs, dtype)[0]

    return run_ranks(1, body, policy="uniform")[0]


def train(
    session: Session, num: int, batch: int, epochs: int, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[int]]:
    net = model(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net, optimizer = session.prepare(net, optimizer)
    loader = session.loader(data(num, dtype), batch=batch)
    seen: list[int] = []
    for _ in session.epochs(epochs):
        for x, y, index in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            seen += index.tolist()
    return [p.detach().clone() for p in net.parameters()], seen


@pytest.mark.parametrize(
    ("shares", "num", "batch"),
    [
        ([5, 2, 1], 64, 8),
        ([6, 1, 1], 61, 8),  # a short last batch
        ([8, 0, 0], 64, 8),  # two workers with nothing
        ([3, 0, 5], 33, 8),  # one left in the last batch
        ([1, 1, 1], 30, 3),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_uneven_workers_end_where_one_process_ends(
    shares: list[int], num: int, batch: int, dtype: torch.dtype, tolerance: float
) -> None:
    def body(session: Session) -> list[torch.Tensor]:
        return train(session, num, batch, 2, dtype)[0]

    policy = {"name": "fixed", "shares": shares}
    everyone = run_ranks(len(shares), body, policy=policy)
    truth = alone(num, batch, 2, dtype)
    for rank in everyone:
        for mine, theirs in zip(rank, truth, strict=True):
            assert (mine - theirs).abs().max() <= tolerance
    for rank in everyone[1:]:
        assert all(torch.equal(a, b) for a, b in zip(rank, everyone[0], strict=True))


def test_each_sample_is_used_once_an_epoch_while_shares_change() -> None:
    def body(session: Session) -> list[list[int]]:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        net, optimizer = session.prepare(net, optimizer)
        loader = session.loader(data(203), batch=20)
        epochs = []
        for _ in session.epochs(3):
            seen: list[int] = []
            for x, y, index in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                counted = session.counted  # a stand-in sample does not count
                seen += index.tolist()[:counted]
            epochs.append(seen)
        return epochs

    ranks = run_ranks(3, body, policy="auto")
    for epoch in range(3):
        assert sorted(i for rank in ranks for i in rank[epoch]) == list(range(203))
    assert len({tuple(sorted(i for rank in ranks for i in rank[e][:3])) for e in range(3)}) > 1
