"""A residual network on small images: augmentation, BatchNorm, momentum, a schedule by step."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPOCHS, BATCH = 2, 24


class Images(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        self.images, self.labels = torch.randn(240, 3, 8, 8), torch.randint(0, 4, (240,))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = nn.functional.pad(self.images[index], (1, 1, 1, 1))
        top, left = torch.randint(0, 3, (2,)).tolist()  # random crop
        image = image[:, top : top + 8, left : left + 8]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return image, self.labels[index]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.relu(self.norm(self.conv(x)))
        return out


def main() -> None:
    torch.manual_seed(0)
    data = Images()
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        Block(8),
        Block(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=EPOCHS * len(loader)
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            criterion(model(x), y).backward()
            optimizer.step()
            scheduler.step()
    torch.save({"model": model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
