"""A tiny language model trained by Hugging Face's Trainer; nothing is downloaded.

    python examples/hugging_face.py
    torchrun --nproc-per-node=2 examples/hugging_face.py
    evenstep run --workers 2 examples/hugging_face.py

Needs `pip install "evenstep[hf]"`. However it is started, the losses are the same to rounding.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from evenstep.adapters.hf import Trainer, TrainingArguments  # instead of transformers'

ALPHABET = "0123456789+= "
LENGTH = 12


class Additions(Dataset[dict[str, torch.Tensor]]):
    """Lines such as '17+25=42', a letter a token; only the sum has labels."""

    def __init__(self, num: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)  # the same data on every worker
        self.terms = torch.randint(50, (num, 2), generator=rng).tolist()

    def __len__(self) -> int:
        return len(self.terms)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        a, b = self.terms[index]
        question, line = f"{a}+{b}=", f"{a}+{b}={a + b}"
        tokens = torch.tensor([ALPHABET.index(letter) for letter in line.ljust(LENGTH)])
        labels = tokens.clone()
        labels[: len(question)] = -100
        labels[len(line) + 1 :] = -100
        return {"input_ids": tokens, "labels": labels}


def main() -> None:
    """Learn to add."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--limit", type=int, default=1024, help="samples")
    parser.add_argument("--output", default="hugging-face-output", help="folder for checkpoints")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(ALPHABET), n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4,
        bos_token_id=None, eos_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=args.output,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=64,  # of all workers together
            per_device_eval_batch_size=64,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            logging_steps=4,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Additions(args.limit, seed=1),
        eval_dataset=Additions(128, seed=2),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model()


if __name__ == "__main__":
    main()
