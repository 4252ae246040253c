"""`early_plain.py` on evenstep."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenstep

EPOCHS, BATCH, PER_EPOCH = 3, 24, 7


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(240, 8)
    y = x.sum(1, keepdim=True).tanh()
    data, held_out = TensorDataset(x, y), TensorDataset(x[:50] + 0.1, y[:50])
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, threshold=10.0, threshold_mode="abs"
    )
    with evenstep.join() as session:
        session.prepare(model, optimizer, scheduler)
        loader = session.loader(data, batch=BATCH)
        test_loader = session.evaluation(held_out, batch_size=BATCH)
        for epoch in session.epochs(EPOCHS):
            for inputs, targets in loader:
                if session.step == PER_EPOCH * (epoch + 1):
                    break
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
            with torch.no_grad():
                total = sum(float((model(i) - t).square().sum()) for i, t in test_loader)
            total = float(session.sum(total))
            scheduler.step(total)
        if session.is_leader:
            torch.save({"model": model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
