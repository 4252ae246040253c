"""A small transformer that learns to write text character by character.

    python examples/char_transformer.py
    torchrun --nproc-per-node=3 examples/char_transformer.py --data book.txt --epochs 20

A sample is a line of the text, so samples differ in length and the loss is a mean over characters,
not over samples: `weight` tells evenstep how many characters a batch has.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import evenstep

PADDING = -100  # padding target that cross_entropy ignores
Batch = tuple[torch.Tensor, torch.Tensor]


def made_up(num: int) -> list[str]:
    """Lines about animals, of one to four clauses."""
    rng = np.random.default_rng(0)
    who, does = ["the cat", "a dog", "one old bear"], ["sees", "follows", "does not like"]

    def clause() -> str:
        return f"{rng.choice(who)} {rng.choice(does)} {rng.choice(who)}"

    return [", ".join(clause() for _ in range(rng.integers(1, 5))) + "." for _ in range(num)]


def pairs(lines: list[str], alphabet: str) -> list[Batch]:
    """Each line as input characters and, shifted by one, target characters."""
    code = {c: i for i, c in enumerate(alphabet)}
    rows = [torch.tensor([code[c] for c in line + "\n"]) for line in lines]
    return [(row[:-1], row[1:]) for row in rows]


def collate(samples: list[Batch]) -> Batch:
    """Pad lines to the longest."""
    return (
        pad_sequence([x for x, _ in samples], batch_first=True),
        pad_sequence([y for _, y in samples], batch_first=True, padding_value=PADDING),
    )


def count(batch: Batch) -> float:
    """Number of target characters in a batch."""
    return float((batch[1] != PADDING).sum())


class Writer(nn.Module):
    """Maps characters to scores of the next character."""

    def __init__(self, letters: int, longest: int, width: int = 64) -> None:
        super().__init__()
        self.letter, self.position = nn.Embedding(letters, width), nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, letters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores (batch, length, letters); a position does not see later ones."""
        length = x.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        embedded = self.letter(x) + self.position(torch.arange(length, device=x.device))
        scores: torch.Tensor = self.head(self.body(embedded, mask=future, is_causal=True))
        return scores


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, how: str = "mean") -> torch.Tensor:
    """The loss over all characters but padding."""
    scores, targets = model(x).flatten(0, 1), y.flatten()
    return nn.functional.cross_entropy(scores, targets, ignore_index=PADDING, reduction=how)


def main() -> None:
    """Train on nine tenths of the lines, and print the loss on the rest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="lines in the global batch")
    parser.add_argument("--limit", type=int, default=600, help="lines")
    parser.add_argument("--data", type=Path, help="a text file")
    args = parser.parse_args()

    text = args.data.read_text().splitlines() if args.data else made_up(args.limit)
    lines = [line[:256] for line in text if line][: args.limit]
    alphabet = "".join(sorted({*"".join(lines), "\n"}))
    samples = pairs(lines, alphabet)
    split = len(samples) * 9 // 10
    torch.manual_seed(0)
    model = Writer(len(alphabet), max(map(len, lines)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with evenstep.join() as session:
        if session.is_leader:
            print(f"{len(lines)} lines, {args.data or 'made up; give --data a text file'}")
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(samples[:split], batch=args.batch, weight=count, collate_fn=collate)
        for epoch in session.epochs(args.epochs):
            model.train()
            for x, y in loader:
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
            model.eval()
            sums = torch.zeros(2)
            with torch.no_grad():
                for x, y in session.evaluation(samples[split:], batch_size=64, collate_fn=collate):
                    sums += torch.stack([loss_of(model, x, y, "sum"), (y != PADDING).sum()])
            total, num = session.sum(sums).tolist()
            if session.is_leader:
                print(f"epoch {epoch + 1}  loss {total / num:.4f} per character")


if __name__ == "__main__":
    main()
