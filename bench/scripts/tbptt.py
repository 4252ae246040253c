"""`tbptt_plain.py` on evenstep."""

import sys

import torch
from torch import nn
from torch.utils.data import Dataset

import evenstep

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


class ColumnStates:
    def __init__(self) -> None:
        self.states = torch.zeros(BATCH, WIDTH)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"states": self.states}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.states = state["states"]


def main() -> None:
    torch.manual_seed(0)
    data = Columns()
    rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
    optimizer = torch.optim.AdamW(rnn.parameters(), lr=1e-2)
    hidden = ColumnStates()
    with evenstep.join() as session:
        session.prepare(rnn, optimizer)
        session.register("hidden", hidden)
        loader = session.loader(data, batch=BATCH, shuffle=False)
        for _ in session.epochs(EPOCHS):
            for i, (x, y) in session.enumerate(loader):
                if i == 0:
                    hidden.states = torch.zeros(BATCH, WIDTH)
                out, last = rnn(x, hidden.states[None, session.first_row :][:, : len(x)])
                following = session.gather(last[0].detach())
                optimizer.zero_grad()
                nn.functional.mse_loss(out, y).backward()
                optimizer.step()
                hidden.states = following
        if session.is_leader:
            torch.save({"model": rnn.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
