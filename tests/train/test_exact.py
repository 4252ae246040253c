"""For any shares, the reduced gradient is that of the global batch; each sample is used once."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from evenstep.errors import EvenstepError
from evenstep.train.session import Session
from tests.train.ranks import run_ranks


def data(num: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    make = torch.Generator().manual_seed(1)
    x = torch.randn(num, 6, generator=make, dtype=dtype)
    return TensorDataset(x, (x.sum(1, keepdim=True) * 0.3).tanh(), torch.arange(num))


# Built once: ranks are threads here and would race for torch's global random state.
torch.manual_seed(3)  # fixed, since the accumulated rounding error depends on the initial values
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
        ([8, 0, 0], 64, 8),  # two workers without a share
        ([3, 0, 5], 33, 8),  # one sample in the last batch
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


def assert_exact(body: Callable[[Session], list[torch.Tensor]], shares: list[int]) -> None:
    """Assert that all ranks get the result of a single process, in double precision."""
    [truth] = run_ranks(1, body, policy="uniform")
    for rank in run_ranks(len(shares), body, policy={"name": "fixed", "shares": shares}):
        for mine, theirs in zip(rank, truth, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


mse = nn.functional.mse_loss
CONVOLVING = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 1)).double()


def convolve(session: Session) -> list[torch.Tensor]:
    """All gradients of an epoch of a model with channels-last weights."""
    net = copy.deepcopy(CONVOLVING)
    nn.utils.convert_conv2d_weight_memory_format(net, torch.channels_last)
    net, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.randn(30, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = []
    for xs, ys in session.loader(TensorDataset(x, x.mean((1, 2, 3))[:, None]), batch=8):
        optimizer.zero_grad()
        mse(net(xs.to(memory_format=torch.channels_last)), ys).backward()
        for p in net.parameters():
            assert p.grad is not None
            assert p.grad.stride() == p.stride()
            gradients.append(p.grad.clone())
        optimizer.step()
    assert not net[0].weight.is_contiguous()  # else strides prove nothing
    return gradients


def test_channels_last_gradients_are_exact_and_keep_their_parameters_strides() -> None:
    assert_exact(convolve, [5, 2, 1])


def test_half_precision_trains_and_plans_reach_all_ranks_exactly() -> None:
    def body(session: Session) -> tuple[list[tuple[int, ...]], list[torch.Tensor], list[float]]:
        net = model(torch.bfloat16)
        net, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        plans, losses = [], []
        loader = session.loader(data(12_000, torch.bfloat16), batch=1200)
        for epoch in session.epochs(1_000_000):
            for x, y, _ in loader:
                optimizer.zero_grad()
                time.sleep(len(x) * (0.00008 if session.rank == 2 else 0.00002))  # the compute
                loss = mse(net(x), y)
                loss.backward()
                optimizer.step()
                plans.append(session.shares_at(session.step - 1))
                losses.append(float(loss.detach()))
            if epoch >= 2 and plans[-1][2] < plans[0][2]:  # a new plan has arrived
                break
        return plans, [p.detach().clone() for p in net.parameters()], losses

    (plans, parameters, losses), *others = run_ranks(3, body, policy="auto")
    for other in others:
        assert other[0] == plans
        assert all(torch.equal(a, b) for a, b in zip(other[1], parameters, strict=True))
    assert all(sum(plan) == 1200 for plan in plans)  # counts that bfloat16 cannot represent
    assert sum(losses[-10:]) < sum(losses[:10]) / 2


class Shared(nn.Module):
    """One layer used twice, with activation checkpointing."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 1)
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()  # else reentrant checkpointing is skipped
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=self._reentrant)
        out: torch.Tensor = self.last(x)
        return out


def checkpointed(template: nn.Module) -> Callable[[Session], list[torch.Tensor]]:
    def body(session: Session) -> list[torch.Tensor]:
        net = copy.deepcopy(template)
        net, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for x, y, _ in session.loader(data(30), batch=8):
            optimizer.zero_grad()
            mse(net(x), y).backward()
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    return body


def test_two_gradients_of_a_parameter_in_one_pass_are_refused_on_every_rank() -> None:
    train, messages = checkpointed(Shared(reentrant=True).double()), []

    def body(session: Session) -> None:
        try:
            train(session)
        except EvenstepError as e:
            messages.append(str(e))
            raise

    with pytest.raises(EvenstepError):
        run_ranks(5, body, policy="uniform")
    assert len(messages) == 5
    for message in messages:
        assert "got its gradient twice in one backward pass" in message
        assert "use_reentrant=False" in message


def test_non_reentrant_activation_checkpointing_is_exact() -> None:
    assert_exact(checkpointed(Shared(reentrant=False).double()), [5, 2, 1])


@pytest.mark.parametrize("shares", [[5, 2, 1], [8, 0, 0]], ids=str)
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_zeroed_in_place_accumulate_exactly(shares: list[int], passes: int) -> None:
    """Over two batches, each with one backward pass or, with two losses, two."""

    def body(session: Session) -> list[torch.Tensor]:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net, optimizer = session.prepare(net, optimizer)
        loader = session.loader(data(48), batch=8)
        for _ in session.epochs(2):
            for i, (x, y, _) in enumerate(loader):
                for _ in range(passes):
                    (mse(net(x), y) / 2).backward()
                if i % 2:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
        return [p.detach().clone() for p in net.parameters()]

    assert_exact(body, shares)
