"""`stream_plain.py` on evenstep."""

import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import IterableDataset

import evenstep

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


def main() -> None:
    torch.manual_seed(0)
    data = Shards()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with evenstep.join() as session:
        session.prepare(model, optimizer)
        loader = session.loader(data, batch=BATCH, transform=decode)
        for _ in session.epochs(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        if session.is_leader:
            torch.save({"model": model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
