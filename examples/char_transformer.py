"""A small transformer that learns to write a text, character by character.

    python examples/char_transformer.py
    torchrun --nproc-per-node=3 examples/char_transformer.py --data book.txt --epochs 20

A sample is a line of the text, so samples differ in length and the loss is a mean over characters,
not over samples: `weight` tells evenstep how many characters a batch counts for.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import evenstep

NONE = -100  # a target that does not count; cross_entropy leaves it out
Batch = tuple[torch.Tensor, torch.Tensor]


def made_up(num: int) -> list[str]:
    """Lines about animals, of one to four clauses."""
    chance = np.random.default_rng(0)
    who, does = ["the cat", "a dog", "one old bear"], ["sees", "follows", "does not like"]

    def clause() -> str:
        return f"{chance.choice(who)} {chance.choice(does)} {chance.choice(who)}"

    return [", ".join(clause() for _ in range(chance.integers(1, 5))) + "." for _ in range(num)]


def pairs(lines: list[str], alphabet: str) -> list[Batch]:
    """Each line as characters to read and, one further, characters to predict."""
    code = {c: i for i, c in enumerate(alphabet)}
    rows = [torch.tensor([code[c] for c in line + "\n"]) for line in lines]
    return [(row[:-1], row[1:]) for row in rows]


def collate(samples: list[Batch]) -> Batch:
    """Lines filled up to the longest."""
    return (
        pad_sequence([x for x, _ in samples], batch_first=True),
        pad_sequence([y for _, y in samples], batch_first=True, padding_value=NONE),
    )


def count(batch: Batch) -> float:
    """How many characters of a batch are predicted."""
    return float((batch[1] != NONE).sum())


class Writer(nn.Module):
    """Characters in, scores of the next character out."""

    def __init__(self, letters: int, longest: int, width: int = 64) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, letters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores (batch, length, letters); no place sees the ones behind it."""
        length = x.shape[1]
        unseen = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        seen = self.letter(x) + self.place(torch.arange(length, device=x.device))
        scores: torch.Tensor = self.head(self.body(seen, mask=unseen, is_causal=True))
        return scores


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, how: str = "mean") -> torch.Tensor:
    """The loss over the characters that count."""
    scores, wanted = model(x).flatten(0, 1), y.flatten()
    return nn.functional.cross_entropy(scores, wanted, ignore_index=NONE, reduction=how)


def main() -> None:
    """Train on nine tenths of the lines, and tell the loss on the rest."""
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
                    sums += torch.stack([loss_of(model, x, y, "sum"), (y != NONE).sum()])
            total, num = session.sum(sums).tolist()
            if session.is_leader:
                print(f"epoch {epoch + 1}  loss {total / num:.4f} a character")


if __name__ == "__main__":
    main()
