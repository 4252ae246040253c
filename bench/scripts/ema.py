"""`ema_plain.py` on evenstep."""

import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import evenstep

EPOCHS, BATCH, ACCUMULATE = 2, 24, 4


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(240, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with evenstep.join() as session:
        session.prepare(model, optimizer)
        session.register("ema", ema)
        loader = session.loader(data, batch=BATCH)
        for _ in session.epochs(EPOCHS):
            for i, (inputs, targets) in session.enumerate(loader):
                loss = nn.functional.mse_loss(model(inputs), targets) / ACCUMULATE
                loss.backward()
                if (i + 1) % ACCUMULATE == 0 or i + 1 == len(loader):
                    optimizer.step()
                    optimizer.zero_grad()
                    ema.update_parameters(model)
        if session.is_leader:
            torch.save({"model": model.state_dict(), "ema": ema.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
