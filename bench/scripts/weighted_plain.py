"""Rare classes are drawn more often, by a sampler; batches are counted over all epochs."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

EPOCHS, BATCH, WARMUP = 2, 24, 5


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(240, 8)
    labels = (x[:, 0] > 1.0).long()
    data = TensorDataset(x, labels)
    sampler = WeightedRandomSampler((1.0 + 4.0 * labels).tolist(), len(data))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    num = 0
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, (num + 1) / WARMUP)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            num += 1
    torch.save({"model": model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
