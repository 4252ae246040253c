"""A loop of Lightning's Fabric: windows of two batches, clipping."""

import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, ACCUMULATE = 2, 24, 2


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(240, 8)
    data = TensorDataset(x, (x.sum(1, keepdim=True) * 0.3).tanh())
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fabric = Fabric(accelerator="cpu", devices=1, precision="64-true")
    wrapped, wrapped_optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=BATCH, shuffle=True))
    for _ in range(EPOCHS):
        for i, (inputs, targets) in enumerate(loader):
            loss = nn.functional.mse_loss(wrapped(inputs), targets)
            fabric.backward(loss / ACCUMULATE)
            if (i + 1) % ACCUMULATE == 0:
                fabric.clip_gradients(wrapped, wrapped_optimizer, max_norm=0.5)
                wrapped_optimizer.step()
                wrapped_optimizer.zero_grad()
    torch.save({"model": model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
