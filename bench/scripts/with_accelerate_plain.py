"""A loop for Accelerate: windows of four batches, clipping, schedule, evaluation."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH = 2, 24


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(250, 8)
    train, test = TensorDataset(x, x[:, :4].argmax(1)), TensorDataset(x[:50], x[:50, :4].argmax(1))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    train_loader = DataLoader(train, batch_size=BATCH, shuffle=True)
    model, optimizer, train_loader, scheduler, test_loader = accelerator.prepare(
        model, optimizer, train_loader, scheduler, DataLoader(test, batch_size=BATCH)
    )
    for epoch in range(EPOCHS):
        model.train()
        for inputs, targets in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        hits = 0
        for inputs, targets in test_loader:
            with torch.no_grad():
                predictions = model(inputs).argmax(1)
            found, wanted = accelerator.gather_for_metrics((predictions, targets))
            hits += int((found == wanted).sum())
        accelerator.print(f"epoch {epoch}: accuracy {hits / len(test):.3f}")
    if accelerator.is_main_process:
        torch.save({"model": accelerator.unwrap_model(model).state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
