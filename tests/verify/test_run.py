"""Verification of scripts with and without a fault; workers are threads."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

from evenstep.errors import EvenstepError
from evenstep.train.session import Finished, Session
from evenstep.verify.compare import Finding
from evenstep.verify.records import ENV_VARIABLE, VerifiedRun
from evenstep.verify.run import verify
from tests.train.ranks import run_ranks

Script = Callable[[Session], None]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def data(num: int = 96) -> TensorDataset:
    make = torch.Generator().manual_seed(1)
    x = torch.randn(num, 6, generator=make)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def network(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *more, nn.Tanh(), nn.Linear(16, 1))


def train(
    session: Session, net: nn.Module, loss: Loss = functional.mse_loss, *, sync: bool = False
) -> None:
    adam = torch.optim.Adam(net.parameters())
    net, optimizer = session.prepare(net, adam, sync_batchnorm=sync)
    loader = session.loader(data(), batch=32)
    for _ in session.epochs(2):
        for x, y in loader:
            loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)  # recorded gradients must be copies


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[[Script], dict[str, Finding]]:
    """Verify a script on three workers with shares 20, 8 and 4 of 32."""

    def findings(script: Script) -> dict[str, Finding]:
        def body(session: Session) -> None:
            with contextlib.suppress(Finished):
                script(session)

        def run_script(run: VerifiedRun, world: int) -> None:
            monkeypatch.setenv(ENV_VARIABLE, msgspec.json.encode(run).decode())
            run_ranks(world, body)

        return {f.subject: f for f in verify(run_script, num_steps=3, shares=[5, 2, 1])}

    return findings


Check = Callable[[Script], dict[str, Finding]]


def test_a_correct_script_agrees_in_everything(check: Check) -> None:
    found = check(lambda session: train(session, network()))
    assert [f.agrees for f in found.values()] == [True, True, True]
    assert "96 samples" in found["data"].message
    assert "shares in step 1: 20, 8, 4" in found["data"].message


def test_double_precision_has_its_own_limit(check: Check) -> None:
    def script(session: Session) -> None:
        net = network().double()
        net.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        train(session, net, lambda out, y: functional.mse_loss(out, y.double()))

    found = check(script)
    assert found["gradients"].agrees
    assert "at most 1e-10 for float64" in found["gradients"].message


def test_dropout_layers_are_turned_off(check: Check) -> None:
    found = check(lambda session: train(session, network(nn.Dropout(0.5))))
    assert found["gradients"].agrees
    assert "dropout was off" in found["gradients"].message


def summed(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(out, y, reduction="sum")


def test_a_summed_loss_is_detected_and_named(check: Check) -> None:
    found = check(lambda session: train(session, network(), summed))
    assert found["gradients"].agrees is False
    assert "but a sum" in found["gradients"].message


def test_samples_left_out_of_the_loss_are_detected(check: Check) -> None:
    found = check(
        lambda session: train(
            session, network(), lambda out, y: functional.mse_loss(out[1:], y[1:])
        )
    )
    assert found["gradients"].agrees is False


def test_random_numbers_in_the_loop_are_not_blamed_on_the_workers(check: Check) -> None:
    def noisy(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(functional.dropout(out, 0.5), y)

    def script(session: Session) -> None:
        torch.manual_seed(0)  # as scripts do: a second run would use the same numbers
        train(session, network(), noisy)

    found = check(script)
    assert found["gradients"].agrees is None
    assert "draws random numbers from torch, as functional.dropout" in found["gradients"].message


def test_a_draw_from_the_generator_of_numpy_is_named(check: Check) -> None:
    def mixed(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(out * float(np.random.rand()), y)

    found = check(lambda session: train(session, network(nn.Dropout(0.5)), mixed))
    assert found["gradients"].agrees is None
    assert "draws random numbers from NumPy: turn" in found["gradients"].message


def test_a_draw_from_a_generator_of_ones_own_is_told_from_the_workers(check: Check) -> None:
    own = torch.Generator()
    own.seed()

    def noisy(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(out * torch.rand(1, generator=own), y)

    found = check(lambda session: train(session, network(), noisy))
    assert found["gradients"].agrees is None
    assert "from no global generator" in found["gradients"].message


def test_local_batch_norm_is_named_as_the_cause(check: Check) -> None:
    found = check(lambda session: train(session, network(nn.BatchNorm1d(16))))
    assert found["gradients"].agrees is False
    assert "BatchNorm (1)" in found["gradients"].message


def test_synchronised_batch_norm_is_not_blamed_for_a_summed_loss(check: Check) -> None:
    net = network(nn.BatchNorm1d(16), nn.Dropout(0.5))
    found = check(lambda session: train(session, copy.deepcopy(net), summed, sync=True))
    assert found["gradients"].agrees is False
    assert "but a sum" in found["gradients"].message
    assert "BatchNorm" not in found["gradients"].message


def test_a_summed_loss_is_named_besides_local_batch_norm(check: Check) -> None:
    found = check(lambda session: train(session, network(nn.BatchNorm1d(16)), summed))
    assert found["gradients"].agrees is False
    assert "but a sum" in found["gradients"].message
    assert "BatchNorm (1)" in found["gradients"].message


def test_a_worker_with_a_part_of_the_data_is_detected(check: Check) -> None:
    def script(session: Session) -> None:
        net = network()
        net, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        part = Subset(data(192), range(32 * session.rank, 32 * session.rank + 96))
        for x, y in session.loader(part, batch=32):
            optimizer.zero_grad()
            functional.mse_loss(net(x), y).backward()
            optimizer.step()

    found = check(script)
    assert list(found) == ["data"]
    assert found["data"].agrees is False
    assert "worker 1 read different data" in found["data"].message


def test_batches_from_another_loader_are_refused(check: Check) -> None:
    def script(session: Session) -> None:
        net = network()
        net, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for x, y in DataLoader(data(), batch_size=32):
            optimizer.zero_grad()
            functional.mse_loss(net(x), y).backward()
            optimizer.step()

    with pytest.raises(EvenstepError, match="outside of a loop over session"):
        check(script)


def test_parameters_that_one_rank_changes_are_detected(check: Check) -> None:
    def script(session: Session) -> None:
        net = network()
        net, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for x, y in session.loader(data(), batch=32):
            optimizer.zero_grad()
            functional.mse_loss(net(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                next(net.parameters()).mul_(1 + session.rank)

    found = check(script)
    assert found["gradients"].agrees
    assert found["parameters"].agrees is False


def test_autocast_raises_the_limit(check: Check) -> None:
    def script(session: Session) -> None:
        net = network()
        net, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for x, y in session.loader(data(), batch=32):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = net(x)
            functional.mse_loss(out.float(), y).backward()
            optimizer.step()

    found = check(script)
    assert found["gradients"].agrees
    assert "at most 5e-02 for float32, bfloat16" in found["gradients"].message
