"""TRL's SFTTrainer on a tiny model and a tokenizer made here, in one process or as a worker."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import torch
from bench.testbed.train import NAME, Faults, install_faults
from datasets import Dataset
from datasets.table import InMemoryTable
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from evenstep.adapters.hf import ElasticMixin
from tests.adapters.hf_train import SameOrder

WORDS = ["<pad>", "<end>", *(f"word{i}" for i in range(14))]


class PlainTrainer(SFTTrainer):
    """What the adapter is compared with."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SameOrder(len(self.train_dataset), self.args.seed)


class Worker(ElasticMixin, SFTTrainer):
    """SFTTrainer as a worker, with faults."""

    faults: Faults

    def create_optimizer(self, *args: Any) -> Any:
        self.faults.session = self._session
        return super().create_optimizer(*args)


def sentences(num: int) -> Dataset:
    """Of different lengths."""
    rng = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 12, (num,), generator=rng).tolist()
    words = [torch.randint(2, len(WORDS), (n,), generator=rng).tolist() for n in lengths]
    table = InMemoryTable.from_pydict({"text": [" ".join(WORDS[i] for i in ids) for ids in words]})
    return Dataset(table, fingerprint="sentences")  # else it is pickled, which not all versions can


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plain", action="store_true", help="TRL's own")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(3)
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = GPT2Config(
        vocab_size=len(WORDS), n_positions=16, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    faults = Faults(options.out)
    install_faults(faults, model)
    trainer = (PlainTrainer if options.plain else Worker)(
        model=model,
        args=SFTConfig(
            output_dir=str(options.out / NAME),
            per_device_train_batch_size=8,
            gradient_accumulation_steps=3,
            num_train_epochs=2,
            learning_rate=0.1,
            optim="sgd",
            max_length=16,
            seed=5,
            bf16=False,
            activation_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=sentences(52),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
        ),
    )
    trainer.faults = faults
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result = {"model": trainer.model.state_dict(), "losses": losses}
    torch.save(result, options.out / f"{'plain' if options.plain else NAME}.pt")


if __name__ == "__main__":
    main()
