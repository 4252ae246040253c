"""`tokens_plain.py` on evenstep."""

import sys

import torch
from torch import nn
from torch.utils.data import Dataset

import evenstep

EPOCHS, BATCH, PAD, VOCAB = 2, 24, 0, 16


class Sequences(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.tokens = torch.randint(1, VOCAB, (240, 12))
        lengths = torch.randint(3, 13, (240, 1))
        self.tokens[torch.arange(12) >= lengths] = PAD

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[index]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(VOCAB, 16), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.rnn(self.embedding(tokens))[0])
        return logits


def num_targets(tokens: torch.Tensor) -> int:
    return int((tokens[:, 1:] != PAD).sum())


def main() -> None:
    torch.manual_seed(0)
    data = Sequences()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with evenstep.join() as session:
        session.prepare(model, optimizer)
        loader = session.loader(data, batch=BATCH, weight=num_targets)
        for _ in range(EPOCHS):
            for tokens in loader:
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        if session.is_leader:
            torch.save({"model": model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
