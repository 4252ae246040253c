"""A tiny language model trained by Hugging Face's Trainer, in one process or as a worker."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bench.testbed.train import NAME, Faults, install_faults
from torch.utils.data import Dataset, Sampler
from transformers import GPT2Config, GPT2LMHeadModel

from evenstep.adapters import hf
from evenstep.train.data.permutation import shuffled
from tests.faults.loops import lose_results

SAMPLES, BATCH, VOCABULARY, LENGTH = 52, 8, 17, 12  # seven batches an epoch, the last is short


MEASURED = ("runtime", "per_second", "flos", "preparation")  # parts of names in the log


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random tokens; how many of them have a label differs much from sample to sample."""

    def __init__(self, num: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCABULARY, (num, LENGTH), generator=rng)
        self.begins = torch.randint(LENGTH - 1, (num,), generator=rng)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index].clone()
        labels[: self.begins[index]] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


class SameOrder(Sampler[int]):
    """For a plain Trainer: the order in which evenstep uses the samples."""

    def __init__(self, num: int, seed: int) -> None:
        self._order, self._num, self._epoch = shuffled(num, seed), num, 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Any:
        self._epoch += 1
        return iter(self._order.items(self._epoch - 1, 0, self._num))


class PlainTrainer(transformers.Trainer):
    """What the adapter is compared with."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SameOrder(len(self.train_dataset), self.args.seed)


class Watch(transformers.TrainerCallback):
    """Writes down what callbacks see, has faults, and holds a run until `go`."""

    def __init__(self, out: Path, faults: Faults, held: bool) -> None:
        self._go, self._faults, self._held = out / "go", faults, held
        self.steps: list[int] = []
        self.writes = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._faults.at("stepped")
        self.steps.append(state.global_step)
        if self._held:  # the second half of the run is for what the test waits for
            until_s = time.monotonic() + (0.02 if state.epoch < args.num_train_epochs / 2 else 10)
            while not self._go.exists() and time.monotonic() < until_s:
                time.sleep(0.02)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.writes += state.is_world_process_zero


class Worker(hf.Trainer):
    """Trainer with faults."""

    faults: Faults
    lose: set[int]

    def create_optimizer(self, *args: Any) -> Any:
        if self._session is not None and self.faults.session is None:
            self.faults.session = self._session
            lose_results(self._session, self.lose)
        return super().create_optimizer(*args)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.faults.at("saving")
        super()._save_optimizer_and_scheduler(output_dir)

    def _backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        super()._backward(loss, **kwargs)
        self.faults.at("reduced")


def exact_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """In double precision: the models' own is in single precision."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    return torch.div(loss, num_items_in_batch)


def accuracy(prediction: Any) -> dict[str, float]:
    """Of the labelled tokens, with a number that depends on their order."""
    guesses, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    right = (guesses == labels)[labels != -100]
    return {"accuracy": right.mean(), "ordered": (right * np.arange(len(right))).sum()}


def build_model(kind: str, double: bool) -> Any:
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=4, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True
        )
        model = get_peft_model(model, lora)
    return model.double() if double else model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plain", action="store_true", help="transformers' own Trainer")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--model", default="full", choices=["full", "lora"])
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--resume", default="", help="a Trainer checkpoint")
    parser.add_argument("--lose", type=int, nargs="*", default=[], help="results of these steps")
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--patience", type=int, default=0, help="evaluations until it stops early")
    parser.add_argument("--set", default="{}", help="more training arguments, as JSON")
    options = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    torch.set_num_threads(1)
    args = hf.TrainingArguments(
        **{
            "output_dir": str(options.out / ("plain" if options.plain else "elastic")),
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": 4,
            "gradient_accumulation_steps": options.accumulate,
            "num_train_epochs": options.epochs,
            "learning_rate": 1e-2,
            "warmup_steps": 3,
            "max_grad_norm": 0.5,
            "seed": 5,
            "logging_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "save_strategy": "steps",
            "save_steps": 4,
            "save_total_limit": 2,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            **json.loads(options.set),
        }
    )
    model = build_model(options.model, options.double)
    faults = Faults(options.out)
    watch = Watch(options.out, faults, options.held)
    trainable = [p for p in model.parameters() if p.requires_grad]
    install_faults(faults, torch.nn.ParameterList(trainable))

    def guesses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        faults.at("predict")
        return logits.argmax(-1)

    def loss_of(*args: Any, **kwargs: Any) -> torch.Tensor:
        faults.at("forward")
        loss = exact_loss(*args, **kwargs)
        faults.at("backward")
        return loss

    patience = options.patience
    stop_early = [transformers.EarlyStoppingCallback(patience)] if patience else []
    kind = PlainTrainer if options.plain else Worker
    trainer = kind(
        model=model,
        args=args,
        train_dataset=Sentences(SAMPLES, 1),
        eval_dataset=Sentences(30, 2),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=guesses,
        compute_loss_func=loss_of if options.double else None,
        callbacks=[watch, *stop_early],
    )
    trainer.faults, trainer.lose = faults, set(options.lose)
    result = trainer.train(resume_from_checkpoint=options.resume or None)
    history = [
        {k: v for k, v in entry.items() if not any(part in k for part in MEASURED)}
        for entry in trainer.state.log_history
    ]
    torch.save(
        {
            "model": trainer.model.state_dict(),
            "lr": trainer.lr_scheduler.get_last_lr()[0],
            "step": trainer.state.global_step,
            "train_loss": result.training_loss,
            "history": json.dumps(history),
            "steps": watch.steps,
            "writes": watch.writes,
            "pid": os.getpid(),
        },
        options.out / f"{'plain' if options.plain else NAME}{os.environ.get('RANK', '')}.pt",
    )


if __name__ == "__main__":
    main()
