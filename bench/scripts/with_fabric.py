"""`with_fabric_plain.py` on evenstep."""

import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.adapters.lightning import FabricStrategy

EPOCHS, BATCH, ACCUMULATE = 2, 24, 2


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=FabricStrategy())
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    x = torch.randn(250, 8)
    data = TensorDataset(x, (x.sum(1, keepdim=True) * 0.3).tanh())
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    loader, test_loader = fabric.setup_dataloaders(
        DataLoader(data, batch_size=BATCH, shuffle=True), DataLoader(data, batch_size=BATCH)
    )
    for epoch in fabric.strategy.epochs(EPOCHS, loader):
        model.train()
        for i, (inputs, targets) in fabric.strategy.enumerate(loader):
            is_last = (i + 1) % ACCUMULATE == 0 or i + 1 == len(loader)
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = nn.functional.mse_loss(model(inputs), targets)
                fabric.backward(loss / ACCUMULATE)
            if is_last:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses = [nn.functional.mse_loss(model(i), t) for i, t in test_loader]
        fabric.print(f"epoch {epoch}: loss {torch.stack(losses).mean():.3f}")
    fabric.save(sys.argv[1], {"model": model})


if __name__ == "__main__":
    main()
