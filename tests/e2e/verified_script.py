"""A training script for `evenstep verify`: correct, or with the fault given as argument."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import Dataset

import evenstep


class Shifted(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random samples, different at every read, like data augmentation."""

    def __init__(self, num: int, start: int) -> None:
        self._x = torch.randn(2 * num, 8, generator=torch.Generator().manual_seed(0))
        self._num, self._start = num, start

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._x[self._start + index]
        return x + 0.1 * torch.randn(8), x.sum().tanh()[None]


def main(fault: str) -> None:
    """Train with augmentation, dropout, loader workers, clipping and accumulation."""
    with evenstep.join(policy="proportional", min_share=30) as session:
        start = session.rank if fault == "own sampler" else 0
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
        net, optimizer = session.prepare(net, torch.optim.AdamW(net.parameters()))
        loader = session.loader(Shifted(200, start), batch=64, num_workers=1)
        for _ in session.epochs(10):
            for number, (x, y) in enumerate(loader):
                if fault == "even shares only" and len(x) < 16:
                    raise ValueError(f"cannot train on {len(x)} samples")
                loss = nn.functional.mse_loss(net(x), y, reduction="none")
                (loss.sum() / 64 if fault == "fixed batch" else loss.mean()).backward()
                if number % 2:
                    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
    raise AssertionError("verify must end the script before this")


if __name__ == "__main__":
    main(sys.argv[1])
