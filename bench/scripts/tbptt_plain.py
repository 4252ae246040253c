"""Truncated backpropagation through time: the state of a column goes on from step to step."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPOCHS, BATCH, STEPS, WIDTH = 2, 24, 10, 8


class Columns(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        self.pieces = torch.randn(BATCH, STEPS, 5, WIDTH)

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        step, column = divmod(index, BATCH)
        piece = self.pieces[column, step]
        return piece, piece.cumsum(0).tanh()


def main() -> None:
    torch.manual_seed(0)
    data = Columns()
    rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
    optimizer = torch.optim.AdamW(rnn.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=BATCH)
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(loader):
            if i == 0:
                hidden = torch.zeros(1, BATCH, WIDTH)
            out, last = rnn(x, hidden)
            optimizer.zero_grad()
            nn.functional.mse_loss(out, y).backward()
            optimizer.step()
            hidden = last.detach()
    torch.save({"model": rnn.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
