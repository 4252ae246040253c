"""Two networks against each other, with an optimizer each; noise comes with the samples."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPOCHS, BATCH, NOISE = 2, 24, 4


class WithNoise(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        self.real = torch.randn(240, 8) * 0.5 + 1.0

    def __len__(self) -> int:
        return len(self.real)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.real[index], torch.randn(NOISE)


def mlp(num_in: int, num_out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(num_in, 16), nn.LeakyReLU(0.2), nn.Linear(16, num_out))


def bce(logits: torch.Tensor, target: float) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


def main() -> None:
    torch.manual_seed(0)
    data = WithNoise()
    generator, critic = mlp(NOISE, 8), mlp(8, 1)
    both = nn.ModuleList([generator, critic])
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    for _ in range(EPOCHS):
        for real, noise in loader:
            fake = generator(noise)
            c_optimizer.zero_grad()
            (bce(critic(real), 1.0) + bce(critic(fake.detach()), 0.0)).backward()
            c_optimizer.step()
            g_optimizer.zero_grad()
            bce(critic(fake), 1.0).backward()
            g_optimizer.step()
    torch.save({"model": both.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
