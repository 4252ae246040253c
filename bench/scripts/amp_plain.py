"""Forward passes in bfloat16, and a window of four batches by the built-in `enumerate`."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, ACCUMULATE = 2, 24, 4


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(240, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    for _ in range(EPOCHS):
        for i, (inputs, targets) in enumerate(loader):
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.mse_loss(model(inputs), targets) / ACCUMULATE
            loss.backward()
            if (i + 1) % ACCUMULATE == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    torch.save({"model": model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
