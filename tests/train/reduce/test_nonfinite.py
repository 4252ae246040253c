"""Gradients that are not finite are told by rank, and change nothing else in a fixed roster."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from evenstep.train.reduce.bucket import Bucket
from evenstep.train.session import Session
from tests.train.ranks import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_one_value_that_is_not_finite_is_found(dtype: torch.dtype, value: float) -> None:
    param = nn.Parameter(torch.zeros(1000, dtype=dtype))
    bucket = Bucket([param], torch.device("cpu"), num_extra=2)
    param.grad = torch.full_like(param, 0.5)
    bucket.fill(0, 1.0)
    bucket.extra.fill_(torch.nan)  # the pulse is no gradient
    assert bucket.is_finite()
    bucket.flat[777] = value
    assert not bucket.is_finite()


def test_finite_gradients_whose_sum_overflows_are_finite() -> None:
    param = nn.Parameter(torch.zeros(1000))
    bucket = Bucket([param], torch.device("cpu"))
    param.grad = torch.full_like(param, 1e38)
    bucket.fill(0, 1.0)
    assert not torch.isfinite(bucket.flat.sum())
    assert bucket.is_finite()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_rank_of_a_fixed_roster_is_named_once_and_training_goes_on(
    caplog: pytest.LogCaptureFixture, scaled: bool
) -> None:
    """With a GradScaler that is usual: it skips the optimizer step."""

    def body(session: Session) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        session.prepare(model, optimizer, scaler)
        data = torch.utils.data.TensorDataset(torch.ones(24, 2))
        for i, (x,) in enumerate(session.loader(data, batch=4)):
            optimizer.zero_grad()
            loss = model(x).square().mean() * (torch.nan if i == 2 and session.rank == 1 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return model.weight.detach()

    with caplog.at_level(logging.WARNING):
        weights = run_ranks(2, body)
    told = "the gradients of rank 1 are not finite (step 2)"
    assert caplog.text.count(told) == (0 if scaled else 1)
    assert all(bool(torch.isfinite(w).all()) == scaled for w in weights)
