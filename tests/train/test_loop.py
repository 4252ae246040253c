"""Common training loops on uneven workers give the result of a single process."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from evenstep.train.session import Session
from tests.train.ranks import run_ranks

Loop = Callable[[Session], list[torch.Tensor]]
mse = nn.functional.mse_loss


def data(num: int = 48) -> TensorDataset:
    make = torch.Generator().manual_seed(1)
    x = torch.randn(num, 6, generator=make, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1, keepdim=True) * 0.3).tanh())


class Tied(nn.Module):
    """One weight used twice, one never, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.again = self.first
        self.unused = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.frozen(self.again(self.first(x).tanh())).tanh())
        return out


torch.manual_seed(3)
TEMPLATE = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
TIED = Tied().double()


def made(template: nn.Module = TEMPLATE) -> nn.Module:
    return copy.deepcopy(template)


def sgd(net: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)


def result(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def plain(session: Session, template: nn.Module = TEMPLATE) -> list[torch.Tensor]:
    net = made(template)
    # Weight decay would change a parameter whose gradient is zero instead of None.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    net, optimizer = session.prepare(net, optimizer)
    loader = session.loader(data(), batch=8)
    for _ in session.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            mse(net(x), y).backward()
            optimizer.step()
    return result(net)


def tied_unused_and_frozen(session: Session) -> list[torch.Tensor]:
    return plain(session, TIED)


def clipping(session: Session) -> list[torch.Tensor]:
    net = made()
    net, optimizer = session.prepare(net, sgd(net))
    for x, y in session.loader(data(), batch=8):
        optimizer.zero_grad()
        mse(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
    return result(net)


def schedules(session: Session) -> list[torch.Tensor]:
    net = made()
    optimizer = sgd(net)
    by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    net, optimizer, by_step, by_epoch = session.prepare(net, optimizer, by_step, by_epoch)
    loader = session.loader(data(), batch=8)
    for _ in session.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            mse(net(x), y).backward()
            optimizer.step()
            by_step.step()
        by_epoch.step()
    return result(net)


def accumulation(session: Session) -> list[torch.Tensor]:
    net = made()
    net, optimizer = session.prepare(net, sgd(net))
    for i, (x, y) in enumerate(session.loader(data(), batch=8)):
        (mse(net(x), y) / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return result(net)


def two_losses_two_optimizers(session: Session) -> list[torch.Tensor]:
    net = made()
    assert isinstance(net, nn.Sequential)
    early = torch.optim.SGD(net[0].parameters(), lr=0.1)
    late = torch.optim.Adam(net[2].parameters(), lr=0.01)
    net, early, late = session.prepare(net, early, late)
    for x, y in session.loader(data(), batch=8):
        early.zero_grad()
        mse(net(x), y).backward()
        early.step()
        late.zero_grad()
        (mse(net(x), y) + nn.functional.l1_loss(net(x), y)).backward()
        late.step()
    return result(net)


def scaled(session: Session) -> list[torch.Tensor]:
    net = made()
    net, optimizer = session.prepare(net, sgd(net))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for x, y in session.loader(data(), batch=8):
        optimizer.zero_grad()
        scaler.scale(mse(net(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return result(net)


def weighted_by_tokens(session: Session) -> list[torch.Tensor]:
    """The loss is a mean over tokens; samples have different numbers of tokens."""
    net = made()
    net, optimizer = session.prepare(net, sgd(net))

    def tokens(batch: list[torch.Tensor]) -> float:
        return float((batch[0][:, 0] > 0).sum() * 3 + len(batch[0]))

    for x, y in session.loader(data(), batch=8, weight=tokens):
        optimizer.zero_grad()
        each = (x[:, :1] > 0) * 3.0 + 1.0
        ((net(x) - y) ** 2 * each).sum().div(each.sum()).backward()
        optimizer.step()
    return result(net)


LOOPS: list[Loop] = [
    plain,
    tied_unused_and_frozen,
    clipping,
    schedules,
    accumulation,
    two_losses_two_optimizers,
    scaled,
    weighted_by_tokens,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("shares", [[5, 2, 1], [8, 0, 0]], ids=str)
def test_the_loop_ends_where_one_process_ends(loop: Loop, shares: list[int]) -> None:
    [truth] = run_ranks(1, loop, policy="uniform")
    everyone = run_ranks(len(shares), loop, policy={"name": "fixed", "shares": shares})
    start = result(TIED if loop is tied_unused_and_frozen else TEMPLATE)
    assert any((a != b).any() for a, b in zip(truth, start, strict=True))
    for rank in everyone:
        assert all(torch.equal(a, b) for a, b in zip(rank, everyone[0], strict=True))
        for mine, theirs in zip(rank, truth, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_sums_and_evaluation_cover_every_sample_once() -> None:
    def body(session: Session) -> tuple[float, int]:
        plain(session)
        seen = [int(y.shape[0]) for _, y in session.evaluation(data(47), batch_size=5)]
        return float(session.sum(float(sum(seen)))), sum(seen)

    answers = run_ranks(3, body, policy={"name": "fixed", "shares": [5, 2, 1]})
    assert [total for total, _ in answers] == [47.0] * 3
    assert answers[0][1] > answers[2][1]


def test_an_evaluation_follows_the_current_shares() -> None:
    def body(session: Session) -> list[int]:
        evaluation = session.evaluation(data(48), batch_size=5, shuffle=True)
        before = sum(len(y) for _, y in evaluation)
        plain(session)
        return [before, sum(len(y) for _, y in evaluation)]

    answers = run_ranks(3, body, policy={"name": "fixed", "shares": [5, 2, 1]})
    assert answers == [[16, 30], [16, 12], [16, 6]]


def test_parameters_start_with_the_leaders_values() -> None:
    def body(session: Session) -> list[torch.Tensor]:
        net = made()
        with torch.no_grad():
            for p in net.parameters():
                p.add_(session.rank)
        return result(session.prepare(net))

    first, second = run_ranks(2, body)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, result(made()), strict=True))


def test_auto_moves_samples_away_from_a_slow_worker() -> None:
    def body(session: Session) -> list[tuple[int, ...]]:
        net = made()
        net, optimizer = session.prepare(net, sgd(net, 0.01))
        loader = session.loader(data(960), batch=96)
        history = []
        for _ in session.epochs(MANY):
            for x, y in loader:
                optimizer.zero_grad()
                compute(session, len(x))
                mse(net(x), y).backward()
                optimizer.step()
                history.append(session.shares_at(session.step - 1))
            if history[-1][2] < history[-1][0] / 2:  # all ranks have the same plan
                break
        return history

    histories = run_ranks(3, body, policy="auto")
    assert histories[0] == histories[1] == histories[2]
    assert sum(histories[0][-1]) == 96


MANY = 1_000_000  # epochs; the loop breaks when its condition holds


def compute(session: Session, samples: int) -> None:
    """Simulated compute time: rank 2 takes four times as long per sample."""
    time.sleep(samples * (0.0008 if session.rank == 2 else 0.0002))


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


NORMED = Normed().double()


def synchronised_norms(session: Session) -> list[torch.Tensor]:
    net = made(NORMED)
    net, optimizer = session.prepare(net, sgd(net), sync_batchnorm=True)
    loader = session.loader(data(), batch=8)
    for _ in session.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            mse(net(x), y).backward()
            optimizer.step()
    return [*result(net), *(b.detach().clone() for b in net.buffers())]


@pytest.mark.parametrize("shares", [[5, 2, 1], [7, 0, 1]], ids=str)
def test_synchronised_norms_end_where_one_process_ends(shares: list[int]) -> None:
    [truth] = run_ranks(1, synchronised_norms, policy="uniform")
    policy = {"name": "fixed", "shares": shares}
    for rank in run_ranks(len(shares), synchronised_norms, policy=policy):
        for mine, theirs in zip(rank, truth, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def test_local_norms_have_equal_statistics_after_an_epoch() -> None:
    def body(session: Session) -> list[torch.Tensor]:
        net = made(NORMED)
        net, optimizer = session.prepare(net, sgd(net))
        for x, y in session.loader(data(), batch=16):
            optimizer.zero_grad()
            mse(net(x), y).backward()
            optimizer.step()
        return [b.detach().clone() for b in net.buffers()]

    first, *others = run_ranks(3, body, policy={"name": "fixed", "shares": [8, 5, 3]})
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
