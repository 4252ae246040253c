"""The factor on the learning rate: applied during optimizer steps, and invisible otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from evenstep.train.data.loader import Weight
from evenstep.train.optimizers import LrFactor
from evenstep.train.plan.plans import LrScale
from evenstep.train.session import Session
from evenstep.train.step import Batch, Step
from tests.train.ranks import run_ranks
from tests.train.test_loop import data, made, mse, result


class Scale(LrScale):
    """A scale with its own step counter."""

    def __init__(self) -> None:
        super().__init__()
        self.now = Step()
        self.attach = LrFactor(self, self.now).attach


def moved_by(scale: Scale, step: int, lr: float = 0.5) -> float:
    """How far one step of SGD moves a weight whose gradient is 1."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=lr)
    scale.attach(optimizer)
    weight.grad = torch.ones(1)
    scale.now.batch = Batch(step=step)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == lr
    return -weight.item()


def test_the_factor_applies_to_steps_and_the_users_rate_stays() -> None:
    scale = Scale()
    assert moved_by(scale, 3) == 0.5
    scale.set_target(4, 3.0)
    assert [moved_by(scale, step) for step in (3, 4, 5)] == [0.5, 1.5, 1.5]


def test_a_warm_up_is_linear_from_the_current_factor() -> None:
    scale = Scale()
    scale.set_target(0, 2.0)
    scale.set_target(10, 4.0, over_steps=4)
    assert [scale.at(step) for step in (9, 10, 11, 12, 13, 14)] == [2.0, 2.5, 3.0, 3.5, 4.0, 4.0]
    scale.set_target(12, 1.0, over_steps=2)  # before the first target is reached
    assert [scale.at(step) for step in (12, 13)] == [2.25, 1.0]


def test_a_new_target_can_keep_the_rest_of_the_warm_up() -> None:
    scale = Scale()
    scale.set_target(0, 3.0, over_steps=10)
    scale.set_target(4, 3.5, scale.steps_left(4))
    assert scale.at(4) == pytest.approx(scale.at(3) + (3.5 - scale.at(3)) / 6)
    assert (scale.at(8) < 3.5, scale.at(9)) == (True, 3.5)
    assert scale.steps_left(10) == 0


def test_a_joiner_continues_the_warm_up() -> None:
    scale, joiner = Scale(), Scale()
    scale.set_target(5, 4.0, over_steps=10)
    joiner.load_state_dict(scale.state_dict())
    assert [joiner.at(step) for step in range(20)] == [scale.at(step) for step in range(20)]


def test_a_rate_that_is_a_tensor_is_not_changed_in_place() -> None:
    weight = nn.Parameter(torch.zeros(1))
    lr = torch.tensor(0.5)
    optimizer = torch.optim.SGD([weight], lr=lr)
    scale = Scale()
    scale.attach(optimizer)
    scale.set_target(0, 2.0)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert (-weight.item(), float(lr)) == (1.0, 0.5)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 3.0), ("sqrt", 3**0.5), ("none", 1.0)])
def test_a_batch_per_worker_scales_the_learning_rate(rule: str, factor: float) -> None:
    """Three workers with 8 samples each train like one with 24 and the scaled learning rate."""

    def trained(session: Session, lr: float, **batch: Any) -> list[torch.Tensor]:
        net = made()
        net, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=lr))
        loader = session.loader(data(), **batch)
        assert (session.batch, len(loader)) == (24, 2)
        for _ in session.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                mse(net(x), y).backward()
                optimizer.step()
            assert session.samples % 48 == 0
        return result(net)

    (expected,) = run_ranks(1, lambda session: trained(session, 0.1 * factor, batch=24))

    def body(session: Session) -> list[torch.Tensor]:
        return trained(session, 0.1, per_worker=8, limit=24)

    for ends in run_ranks(3, body, batch={"lr_rule": rule}):
        for mine, theirs in zip(ends, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("weight", [None, lambda batch: 512.0 * len(batch[0])])
def test_squared_norms_are_of_the_workers_mean_and_of_the_batch(weight: Weight | None) -> None:
    def body(session: Session) -> tuple[int, float, float, float]:
        net = made()
        net, _ = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        loader = session.loader(data(), per_worker=8, limit=24, weight=weight)
        for _ in session.epochs(1):
            for x, y in loader:
                own = made()
                mse(own(x), y).backward()
                norm = sum(float((p.grad**2).sum()) for p in own.parameters() if p.grad is not None)
                mse(net(x), y).backward()
                whole = sum(
                    float((p.grad**2).sum()) for p in net.parameters() if p.grad is not None
                )
                step = session._job.step
                assert step.grad_squared_norm == pytest.approx(whole, rel=1e-6)
                return session.counted, norm, step.reports[session.rank].grad_squared_norm, whole
        raise AssertionError("no step")

    for counted, norm, measured, _ in run_ranks(3, body, batch={"lr_rule": "adascale"}):
        assert counted > 0
        assert measured == pytest.approx(norm, rel=1e-6)


def test_after_the_session_an_optimizer_uses_the_users_own_rate() -> None:
    def body(session: Session) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Linear(6, 1, dtype=torch.float64)
        net, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
        for x, y in session.loader(data(), per_worker=8, limit=24):
            mse(net(x), y).backward()
            optimizer.step()
        return net, optimizer

    for net, optimizer in run_ranks(3, body, batch={"lr_rule": "linear"}):
        weight = net.get_parameter("bias")
        before, weight.grad = weight.detach().clone(), torch.ones(1, dtype=torch.float64)
        optimizer.step()
        assert float(before - weight.detach()) == pytest.approx(0.5)


def test_detaching_restores_the_users_rate_after_a_failed_step() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scale = Scale()
    detach = scale.attach(optimizer)
    scale.set_target(0, 3.0)

    def fail() -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(fail)
    assert optimizer.param_groups[0]["lr"] == 1.5
    detach()
    assert optimizer.param_groups[0]["lr"] == 0.5
