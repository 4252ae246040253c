"""`classify_plain.py` on evenstep."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenstep

EPOCHS, BATCH = 2, 24


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(250, 8)
    train, test = TensorDataset(x, x[:, :4].argmax(1)), TensorDataset(x[:50], x[:50, :4].argmax(1))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with evenstep.join() as session:
        session.prepare(model, optimizer, scheduler)
        train_loader = session.loader(train, batch=BATCH)
        test_loader = session.evaluation(test, batch_size=BATCH)
        for epoch in session.epochs(EPOCHS):
            model.train()
            for inputs, targets in train_loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            scheduler.step()
            model.eval()
            with torch.no_grad():
                hits = sum(int((model(i).argmax(1) == t).sum()) for i, t in test_loader)
            hits = int(session.sum(hits))
            print(f"epoch {epoch}: accuracy {hits / len(test):.3f}")
        if session.is_leader:
            torch.save({"model": model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
