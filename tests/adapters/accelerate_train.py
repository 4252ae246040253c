"""A loop as people write it for Accelerate, in one process or as a worker."""

from __future__ import annotations

import argparse
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import accelerate
import torch
from bench.testbed.train import NAME, Faults, Numbers, install_faults
from torch import nn
from torch.utils.data import DataLoader, Dataset

import evenstep
from evenstep.adapters.accelerate import Accelerator
from evenstep.train.data.permutation import shuffled
from tests.faults.loops import lose_results, net

SAMPLES, BATCH, EPOCHS = 232, 24, 3  # ten batches an epoch, the last is short


class Ragged(Dataset[Any]):
    """Samples, and sequences of different lengths."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        x, y = self._numbers[index]
        return x, y, torch.full((1 + index % 7,), index)


def pad(samples: list[Any]) -> Any:
    x, y, sequences = zip(*samples, strict=True)
    padded = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=-1)
    return {"x": torch.stack(x), "y": torch.stack(y), "sequence": padded}


@torch.no_grad()
def evaluate(
    accelerator: Any, model: nn.Module, loader: Any, faults: Faults, gathers: str
) -> list[list[float]]:
    """For each sample its error and its sequence, in the order in which they were gathered."""
    rows: list[list[float]] = []
    for batch in loader:
        faults.at("predict")
        error = (model(batch["x"]) - batch["y"]).abs()
        sequence = accelerator.pad_across_processes(batch["sequence"], dim=1, pad_index=-1)
        if gathers == "never":
            continue
        if gathers == "twice":
            accelerator.gather_for_metrics(error)
            faults.at("between")
        found = accelerator.gather_for_metrics({"error": error, "sequence": sequence})
        names = [str(int(i)) for i in batch["sequence"][:, 0]]
        assert len(accelerator.gather_for_metrics(names, use_gather_object=True)) == len(
            found["error"]
        )
        pairs = zip(found["error"], found["sequence"], strict=True)
        rows += [[float(error), *(i for i in items.tolist() if i >= 0)] for error, items in pairs]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plain", action="store_true", help="without evenstep")
    parser.add_argument("--lose", type=int, nargs="*", default=[], help="results of these steps")
    parser.add_argument("--gathers", default="once", choices=["once", "never", "twice"])
    parser.add_argument("--call", default="", help="a method of the accelerator")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = net()
    faults = Faults(options.out)
    install_faults(faults, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    data, order = Numbers(SAMPLES), shuffled(SAMPLES, 0)
    joined: AbstractContextManager[Any] = nullcontext() if options.plain else evenstep.join()
    with joined as session:
        loader: Any
        if options.plain:
            accelerator = accelerate.Accelerator(gradient_accumulation_steps=4, cpu=True)
            indices: list[int] = []
            loader = DataLoader(data, batch_size=BATCH, sampler=indices)
        else:
            faults.session = session
            lose_results(session, set(options.lose))
            accelerator = Accelerator(session, gradient_accumulation_steps=4, cpu=True)
            loader = session.loader(data, batch=BATCH)
        if options.call:
            getattr(accelerator, options.call)(torch.zeros(1))
        tests: Any = DataLoader(Ragged(Numbers(50)), batch_size=12, collate_fn=pad)
        model, optimizer, loader, scheduler, tests = accelerator.prepare(
            model, optimizer, loader, scheduler, tests
        )
        writes, evaluated = 0, []
        for epoch in range(EPOCHS) if options.plain else session.epochs(EPOCHS):
            if options.plain:
                indices[:] = order.items(epoch, 0, SAMPLES)
            for x, y in loader:
                with accelerator.accumulate(model):
                    faults.at("forward")
                    loss = nn.functional.mse_loss(model(x), y)
                    faults.at("backward")
                    accelerator.backward(loss)
                    faults.at("reduced")
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.05)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    faults.at("stepped")
            model.eval()
            evaluated.append(evaluate(accelerator, model, tests, faults, options.gathers))
            model.train()
            writes += accelerator.is_main_process
            accelerator.wait_for_everyone()
        result = {
            "model": model.state_dict(),
            "lr": scheduler.get_last_lr()[0],
            "writes": writes,
            "evaluated": evaluated,
        }
        name = "plain" if options.plain else NAME
        torch.save(result, options.out / f"{name}{os.environ.get('RANK', '')}.pt")


if __name__ == "__main__":
    main()
