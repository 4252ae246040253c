"""A stream of shards, read through a shuffle buffer; samples are decoded one by one."""

import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

EPOCHS, BATCH = 2, 24


class Shards(IterableDataset[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        rng = torch.Generator().manual_seed(self.epoch)
        buffer: list[int] = []
        for shard in torch.randperm(8, generator=rng).tolist():
            for i in range(30):
                buffer.append(30 * shard + i)
                if len(buffer) > 40:
                    yield buffer.pop(int(torch.randint(len(buffer), (), generator=rng)))
        yield from buffer


def decode(sample: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.sin(torch.arange(1, 9) * (0.1 + sample))
    return x, x.sum(0, keepdim=True).tanh()


def collate(samples: list[int]) -> list[torch.Tensor]:
    batch: list[torch.Tensor] = default_collate([decode(sample) for sample in samples])
    return batch


def main() -> None:
    torch.manual_seed(0)
    data = Shards()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=BATCH, collate_fn=collate)
    for epoch in range(EPOCHS):
        data.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    torch.save({"model": model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
