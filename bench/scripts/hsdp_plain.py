"""A network of blocks: windows of two batches, clipping, a schedule."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, ACCUMULATE = 2, 24, 2


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(240, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    model = nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 15), nn.Linear(15, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    for _ in range(EPOCHS):
        for i, (inputs, targets) in enumerate(loader):
            loss = nn.functional.mse_loss(model(inputs), targets) / ACCUMULATE
            loss.backward()
            if (i + 1) % ACCUMULATE == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    torch.save({"model": model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
