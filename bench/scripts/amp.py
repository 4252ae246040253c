"""`amp_plain.py` on evenstep."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenstep

EPOCHS, BATCH, ACCUMULATE = 2, 24, 4


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(240, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenstep.join() as session:
        session.prepare(model, optimizer)
        loader = session.loader(data, batch=BATCH)
        for _ in session.epochs(EPOCHS):
            for i, (inputs, targets) in session.enumerate(loader):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = nn.functional.mse_loss(model(inputs), targets) / ACCUMULATE
                loss.backward()
                if (i + 1) % ACCUMULATE == 0 or i + 1 == len(loader):
                    optimizer.step()
                    optimizer.zero_grad()
        if session.is_leader:
            torch.save({"model": model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
