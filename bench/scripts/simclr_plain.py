"""A contrastive loss over all pairs of the batch: two views of every sample."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPOCHS, BATCH = 2, 24


class Views(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        self.x = torch.randn(240, 8)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.1 * torch.randn(8), self.x[index] + 0.1 * torch.randn(8)


def nt_xent(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    z = nn.functional.normalize(torch.cat([a, b]), dim=1)
    logits = (z @ z.T / 0.5).fill_diagonal_(float("-inf"))
    target = torch.arange(len(z)).roll(len(a))
    return nn.functional.cross_entropy(logits, target)


def main() -> None:
    torch.manual_seed(0)
    data = Views()
    encoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    for _ in range(EPOCHS):
        for first, second in loader:
            a, b = encoder(first), encoder(second)
            loss = nt_xent(a, b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.save({"model": encoder.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
