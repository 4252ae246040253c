"""A small language model, trained and evaluated by Hugging Face's Trainer."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

VOCABULARY, LENGTH = 17, 12


class Answers(Dataset[dict[str, torch.Tensor]]):
    """Only the answer has labels; its length differs from sample to sample."""

    def __init__(self, num: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCABULARY, (num, LENGTH), generator=rng)
        self.begins = torch.randint(1, LENGTH - 1, (num,), generator=rng)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index].clone()
        labels[: self.begins[index]] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def token_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """The mean over tokens, in the precision of the model: its own is in single precision."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    return torch.div(loss, num_items_in_batch)


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2,
        bos_token_id=None, eos_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=str(Path(sys.argv[1]).with_suffix("")),
            num_train_epochs=2,
            per_device_train_batch_size=24,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            learning_rate=1e-2,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            eval_strategy="epoch",
            save_strategy="no",
            logging_steps=1,
            seed=0,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Answers(250, seed=1),
        eval_dataset=Answers(50, seed=2),
        compute_loss_func=token_loss,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save({"model": trainer.model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
