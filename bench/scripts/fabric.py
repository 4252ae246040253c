"""`fabric_plain.py` on evenstep."""

import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import TensorDataset

import evenstep

EPOCHS, BATCH, ACCUMULATE = 2, 24, 2


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(240, 8)
    data = TensorDataset(x, (x.sum(1, keepdim=True) * 0.3).tanh())
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fabric = Fabric(accelerator="cpu", devices=1, precision="64-true")
    wrapped, wrapped_optimizer = fabric.setup(model, optimizer)
    with evenstep.join() as session:
        session.prepare(model, optimizer)
        loader = session.loader(data, batch=BATCH)
        for _ in session.epochs(EPOCHS):
            for window in session.accumulate(loader, ACCUMULATE):
                for inputs, targets in window:
                    loss = nn.functional.mse_loss(wrapped(inputs), targets)
                    fabric.backward(loss / ACCUMULATE)
                fabric.clip_gradients(wrapped, wrapped_optimizer, max_norm=0.5)
                wrapped_optimizer.step()
                wrapped_optimizer.zero_grad()
        if session.is_leader:
            torch.save({"model": model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
