"""A small language model: `get_batch`, micro-steps, a learning rate by iteration, decay groups."""

import math
import sys

import torch
from torch import nn

BLOCK, BATCH, STEPS, MICRO_STEPS, VOCAB, WIDTH = 16, 24, 10, 2, 32, 16


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.layer, self.head = layer, nn.Linear(WIDTH, VOCAB)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        logits = self.head(self.layer(h, mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def lr_at(step: int) -> float:
    return 1e-2 * (min(1.0, (step + 1) / 3) * 0.5 * (1 + math.cos(math.pi * step / STEPS)))


def main() -> None:
    torch.manual_seed(1337)
    data = (torch.rand(500) * VOCAB).long()

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(data) - BLOCK, (BATCH,)).tolist()
        x = torch.stack([data[i : i + BLOCK] for i in starts])
        return x, torch.stack([data[i + 1 : i + 1 + BLOCK] for i in starts])

    model = GPT()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        for _ in range(MICRO_STEPS):
            x, y = get_batch()
            loss = model(x, y) / MICRO_STEPS
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.save({"model": model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
