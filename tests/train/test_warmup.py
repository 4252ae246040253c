"""Warm-up to a learning-rate factor that is estimated during training."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.utils.data import TensorDataset

from evenstep.train.session import Session
from tests.train.ranks import run_ranks
from tests.train.test_loop import made, mse, sgd

WARMUP, MOST_STEPS = 1000, 4000


def test_the_first_adascale_factor_is_reached_by_warm_up() -> None:
    rng = torch.Generator().manual_seed(1)
    noise = torch.randn(4800, 7, generator=rng, dtype=torch.float64)
    labelled = TensorDataset(noise[:, :6], noise[:, 6:])  # random labels: gradients are all noise

    def body(session: Session) -> list[float]:
        net = made()
        net, optimizer = session.prepare(net, sgd(net, 0.001))
        loader = session.loader(labelled, per_worker=8, limit=24)
        factors = [1.0]
        for _ in session.epochs(MOST_STEPS * 24 // 4800):
            for x, y in loader:
                optimizer.zero_grad()
                mse(net(x), y).backward()
                optimizer.step()
                factors.append(session._job.lr_scale.at(session.step))
                if len(factors) > 5 and factors[-5] != 1.0:
                    return factors
        raise AssertionError(f"the factor did not change in {session.step} steps")

    batch = {"lr_rule": "adascale", "lr_warmup_steps": WARMUP}
    first, *others = run_ranks(3, body, policy="uniform", batch=batch)
    changes = [after - before for before, after in pairwise(first)]
    # The batch is three times the base, so the factor is at most 3; a new target adds a little.
    assert 0 < max(changes) <= 2 * 2 / (WARMUP - 10)
    assert all(other == first for other in others)
