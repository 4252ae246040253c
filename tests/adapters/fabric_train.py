"""A loop as people write it for Lightning's Fabric, in one process or as a worker."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench.testbed.train import NAME, Ballast, Faults, Numbers, install_faults
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from evenstep.adapters.lightning import FabricStrategy
from evenstep.train.data.permutation import shuffled
from tests.faults.loops import lose_results

SAMPLES, BATCH, EPOCHS = 232, 24, 3  # ten batches an epoch, the last is short


def numbers(loop: str, strategy: Any, loader: Any, epoch: int) -> Iterator[tuple[int, Any]]:
    """Batches with their numbers, counted in the right way or by the loop itself."""
    if loop == "early":  # leaves the second epoch by a count of its own
        return zip(range(10 if epoch == 0 else 7), loader, strict=False)
    return strategy.enumerate(loader) if loop == "numbered" else enumerate(loader)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plain", action="store_true", help="without evenstep")
    parser.add_argument("--loop", default="numbered", choices=["numbered", "counted", "early"])
    parser.add_argument("--precision", default="64-true")
    parser.add_argument("--lose", type=int, nargs="*", default=[], help="results of these steps")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    torch.set_num_threads(1)
    plain, faults = options.plain, Faults(options.out)
    if options.precision == "64-true":
        torch.set_default_dtype(torch.float64)
    fabric = Fabric(
        accelerator="cpu",
        devices=1,
        precision=options.precision,
        strategy="auto" if plain else FabricStrategy(),
    )
    fabric.launch()
    strategy: Any = fabric.strategy
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Ballast(), nn.Linear(16, 1))
    kind = torch.get_default_dtype()
    model = model.to(kind)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    install_faults(faults, model)
    if not plain:
        faults.session = strategy.session
        lose_results(strategy.session, set(options.lose))
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    order, indices = shuffled(SAMPLES, 0), list[int]()
    loader, test_loader = fabric.setup_dataloaders(
        DataLoader(
            Numbers(SAMPLES), BATCH, **({"sampler": indices} if plain else {"shuffle": True})
        ),
        DataLoader(Numbers(50), BATCH),
    )
    window = 1 if options.loop == "early" else 4
    losses: dict[str, float] = {}
    evaluated, gathered, told = [], [], []
    for epoch in range(EPOCHS) if plain else strategy.epochs(EPOCHS, loader):
        if plain:
            indices[:] = order.items(epoch, 0, SAMPLES)
        model.train()
        for i, (x, y) in (
            enumerate(loader) if plain else numbers(options.loop, strategy, loader, epoch)
        ):
            x, y = x.to(kind), y.to(kind)
            is_last = (i + 1) % window == 0 or i + 1 == len(loader)
            faults.at("forward")
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = nn.functional.mse_loss(model(x), y)
                faults.at("backward")
                fabric.backward(loss / window)
            faults.at("reduced")
            losses[f"{epoch}-{i}"] = float(fabric.all_reduce(loss.detach().clone()))
            if is_last:
                fabric.clip_gradients(model, optimizer, max_norm=0.05)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            faults.at("stepped")
        num = float(fabric.all_reduce(torch.ones(()), reduce_op="sum"))
        ranks = fabric.all_gather(torch.tensor([fabric.global_rank])).reshape(-1)
        told.append([num, ranks.tolist(), fabric.broadcast({"rank": fabric.global_rank})["rank"]])
        model.eval()
        rows: list[float] = []
        with torch.no_grad():
            found = (nn.functional.mse_loss(model(x.to(kind)), y) for x, y in test_loader)
            evaluated.append(float(sum(found)))
            for x, y in test_loader if plain else strategy.evaluate(test_loader):
                faults.at("predict")
                errors = (model(x.to(kind)) - y).abs().reshape(-1)
                rows += (errors if plain else strategy.gather_for_metrics(errors)).tolist()
            gathered.append(rows)
        faults.at("saving")
        fabric.save(options.out / f"epoch-{epoch}.ckpt", {"model": model, "optimizer": optimizer})
        faults.at("saved")
    result = {
        "model": model.state_dict(),
        "lr": scheduler.get_last_lr()[0],
        "losses": losses,
        "evaluated": evaluated,
        "gathered": gathered,
        "told": told,
        "leads": fabric.is_global_zero,
    }
    name = "plain" if plain else NAME
    torch.save(result, options.out / f"{name}{os.environ.get('RANK', '')}.pt")


if __name__ == "__main__":
    try:
        main()
    except Exception:  # the fork server ends without what Python does at its end
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()
