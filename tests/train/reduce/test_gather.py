"""Losses over pairs of samples: the same step as one process, for any shares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset

from evenstep.errors import EvenstepError
from evenstep.launch.ranks import StaticRank
from evenstep.train.join import fixed_session
from evenstep.train.session import Session
from tests.train.ranks import run_ranks

NUM, BATCH = 44, 12  # the last batch has 8 samples

Loss = Callable[[Session, Tensor, Tensor, Tensor], Tensor]


def on_every_worker(session: Session, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Every worker computes the loss of the whole batch."""
    a, b = session.gather(a), session.gather(b)
    logits = scale * a @ b.T
    target = torch.arange(len(a))
    return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2


def on_own_rows(session: Session, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Every worker computes the mean loss of its own rows against all others."""
    all_a, all_b = session.gather(a), session.gather(b)
    target = session.first_row + torch.arange(len(a))
    forth = cross_entropy(scale * a @ all_b.T, target)
    back = cross_entropy(scale * b @ all_a.T, target)
    return (forth + back) / 2


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 4), nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        rng = torch.Generator().manual_seed(3)  # ranks are threads: not the common one
        for parameter in (*self.one.parameters(), *self.two.parameters()):
            nn.init.normal_(parameter, generator=rng)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.one(x)), normalize(self.two(y))


def train(session: Session, loss: Loss) -> list[Tensor]:
    model = Towers().double()
    rng = torch.Generator().manual_seed(1)
    data = [torch.randn(NUM, size, generator=rng, dtype=torch.float64) for size in (6, 5)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = session.prepare(model, optimizer)
    loader = session.loader(TensorDataset(*data), batch=BATCH)
    for _ in session.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            a, b = model(x, y)
            loss(session, a, b, model.scale).backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("shares", [[4, 4, 4], [7, 4, 1], [11, 1, 0]])
@pytest.mark.parametrize("loss", [on_every_worker, on_own_rows])
def test_a_contrastive_loss_is_exact_for_any_shares(shares: list[int], loss: Loss) -> None:
    [expected] = run_ranks(1, lambda session: train(session, loss))
    policy = {"name": "fixed", "shares": shares}
    for found in run_ranks(3, lambda session: train(session, loss), policy=policy):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_rows_come_in_the_order_of_the_batch_and_must_be_one_a_sample() -> None:
    def body(session: Session) -> list[list[int]]:
        model = nn.Linear(1, 1)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = session.loader(TensorDataset(torch.arange(20)), batch=10, shuffle=False)
        seen = []
        for (x,) in loader:
            seen.append(session.gather(x).tolist())
            with pytest.raises(EvenstepError, match=f"got {len(x) + 1} rows for the {len(x)}"):
                session.gather(torch.cat([x, x[:1]]))
            model(x[:, None].float()).mean().backward()
            with pytest.raises(EvenstepError, match="Call it before"):
                session.gather(x)
            optimizer.step()
        return seen

    policy = {"name": "fixed", "shares": [7, 3]}
    assert run_ranks(2, body, policy=policy) == [[[*range(10)], [*range(10, 20)]]] * 2


@pytest.mark.parametrize("world", [1, 2])
def test_what_cannot_be_summed_is_refused_by_name(world: int) -> None:
    def body(session: Session) -> None:
        model = nn.Linear(1, 1)
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        odd = torch.ones(20).to(torch.float8_e8m0fnu)
        for (x,) in session.loader(TensorDataset(torch.ones(20, 1)), batch=10):
            for call in (session.sum, session.gather):
                with pytest.raises(EvenstepError, match=r"of torch\.float8_e8m0fnu, which"):
                    call(odd[: len(x)])
                with pytest.raises(EvenstepError, match=r"torch\.sparse_coo, and only dense"):
                    call(x.to_sparse())
            model(x).mean().backward()

    run_ranks(world, body)


def test_rows_of_a_worker_whose_samples_weigh_nothing_get_no_gradient_and_are_refused() -> None:
    """On all workers: its own gradients have the weight 0, and so would those of its rows."""

    def body(session: Session) -> list[list[float]]:
        model = nn.Linear(1, 1)
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        weights = TensorDataset(torch.tensor([1.0] * 7 + [0.0] * 3)[:, None])
        seen = []
        loader = session.loader(
            weights, batch=10, shuffle=False, weight=lambda b: float(b[0].sum())
        )
        for (x,) in loader:
            seen.append(session.gather(model(x).detach() * 0 + x).flatten().tolist())
            with pytest.raises(EvenstepError, match=r"step 0 the samples of 1 of 2 workers weigh"):
                session.gather(model(x))
            model(x).mean().backward()
        return seen

    policy = {"name": "fixed", "shares": [7, 3]}
    assert run_ranks(2, body, policy=policy) == [[[1.0] * 7 + [0.0] * 3]] * 2


def test_rows_cannot_be_used_backward_once_the_session_is_closed() -> None:
    def body(session: Session) -> Tensor:
        model = nn.Linear(1, 1)
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in session.loader(TensorDataset(torch.ones(20, 1)), batch=10):
            loss: Tensor = session.gather(model(x)).mean()
            model(x).mean().backward()
        return loss

    for loss in run_ranks(2, body):
        with pytest.raises(EvenstepError, match=r"through session\.gather after the session was"):
            loss.backward()


def test_features_are_gathered_in_the_loop_only() -> None:
    with fixed_session(StaticRank()) as session:
        model = nn.Linear(1, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        session.loader(TensorDataset(torch.arange(20)), batch=10)
        with pytest.raises(EvenstepError, match="needs a batch"):
            session.gather(torch.zeros(10, 1))
