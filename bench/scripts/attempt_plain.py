"""A loop as frameworks have it: a closure for the passes, and counters of its own."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH = 2, 24


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(240, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)

    def training_step(batch: list[torch.Tensor]) -> float:
        inputs, targets = batch
        loss = nn.functional.mse_loss(model(inputs), targets) / 2
        loss.backward()
        return loss.item()

    for _ in range(EPOCHS):
        losses = []
        for num, batch in enumerate(loader):
            losses.append(training_step(batch))
            if num % 2 == 1:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        print(f"last losses: {losses[-2:]}")
    torch.save({"model": model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
