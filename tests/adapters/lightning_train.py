"""A small model trained by Lightning's Trainer, in one process or as a worker."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from bench.testbed.train import NAME, Ballast, Faults, Numbers, install_faults
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Sampler

from evenstep.adapters.lightning import Strategy
from evenstep.train.data.permutation import shuffled
from tests.faults.loops import lose_results

SAMPLES, BATCH, SEED = 52, 8, 5  # seven batches an epoch, the last is short


class SameOrder(Sampler[int]):
    """For a plain Trainer: the order in which evenstep uses the samples."""

    def __init__(self) -> None:
        self._order, self._epoch = shuffled(SAMPLES, SEED), 0

    def __len__(self) -> int:
        return SAMPLES

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Any:
        return iter(self._order.items(self._epoch, 0, SAMPLES))


class Module(pl.LightningModule):
    """Everything that people log and schedule."""

    def __init__(self, faults: Faults, scheduler: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Ballast(), nn.Linear(16, 1))
        self.faults, self.scheduler = faults, scheduler
        self.synced = True

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = (part.to(self.net[0].weight.dtype) for part in batch)
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.faults.at("forward")
        loss = self.loss(batch) / (1 + 0.1 * batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=self.synced)
        self.faults.at("backward")
        return loss

    def on_after_backward(self) -> None:
        self.faults.at("reduced")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.faults.at("predict")
        loss = self.loss(batch)
        self.log("val", loss)
        self.log("worst", loss, reduce_fx="max")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.scheduler == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            config = {"scheduler": plateau, "monitor": "loss_epoch"}
        else:
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + 0.1 * i))
            config = {"scheduler": schedule, "interval": self.scheduler}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Game(Module):
    """Two optimizers, stepped by the script; the second net trains on the output of the first."""

    def __init__(self, faults: Faults, scheduler: str) -> None:
        super().__init__(faults, scheduler)
        self.automatic_optimization = False
        self.second = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.faults.at("forward")
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.faults.at("between")
        x, y = (part.to(self.net[0].weight.dtype) for part in batch)
        second.zero_grad()
        loss = nn.functional.mse_loss(self.second(self.net(x).detach()), y)
        self.faults.at("backward")
        self.manual_backward(loss)
        second.step()

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.AdamW(self.net.parameters(), lr=1e-2),
            torch.optim.AdamW(self.second.parameters(), lr=1e-2),
        )


class Watch(Callback):
    """Writes down what callbacks see, has faults, and holds a run until `go`."""

    def __init__(self, out: Path, faults: Faults, held: bool, lose: set[int]) -> None:
        self._go, self._faults, self._held, self._lose = out / "go", faults, held, lose
        self.steps: list[list[int]] = []
        self.logged: list[list[float]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if isinstance(trainer.strategy, Strategy):
            self._faults.session = trainer.strategy.session
            lose_results(trainer.strategy.session, self._lose)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._faults.at("stepped")
        self.steps.append([trainer.current_epoch, batch_idx, trainer.global_step])
        if self._held:  # the second half of the run is for what the test waits for
            is_first = trainer.current_epoch < trainer.max_epochs / 2
            until_s = time.monotonic() + (0.02 if is_first else 10)
            while not self._go.exists() and time.monotonic() < until_s:
                time.sleep(0.02)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self._note(trainer, "val", "worst")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if module.synced:
            self._note(trainer, "loss_epoch")

    def _note(self, trainer: Any, *names: str) -> None:
        values = (float(trainer.callback_metrics[name]) for name in names)
        self.logged.append([trainer.global_step, *values])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plain", action="store_true", help="without evenstep")
    parser.add_argument("--scheduler", default="step", choices=["step", "epoch", "plateau"])
    parser.add_argument("--game", action="store_true", help="manual optimisation")
    parser.add_argument("--resume", default="", help="a checkpoint of Lightning's")
    parser.add_argument("--lose", type=int, nargs="*", default=[], help="results of these steps")
    parser.add_argument("--unsynced", action="store_true", help="no sums in training steps")
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--stop", action="store_true", help="early, by a callback")
    parser.add_argument("--set", default="{}", help="more arguments of Trainer, as JSON")
    options = parser.parse_args()

    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    torch.set_num_threads(1)
    faults = Faults(options.out)
    module = (Game if options.game else Module)(faults, options.scheduler)
    module.synced = not options.unsynced
    install_faults(faults, module)
    watch = Watch(options.out, faults, options.held, set(options.lose))
    folder = options.out / ("plain" if options.plain else "elastic")
    saving = ModelCheckpoint(folder / "best", monitor="val", save_top_k=2)
    every = ModelCheckpoint(
        folder / "every",
        "{step}",
        every_n_train_steps=3,
        save_top_k=-1,
        save_on_train_epoch_end=False,
    )
    stopping = EarlyStopping("val", min_delta=1e-3, patience=1)
    numbers = Numbers(SAMPLES)
    sampler: Any = {"sampler": SameOrder()} if options.plain else {"shuffle": True}
    trainer = pl.Trainer(
        **{
            "strategy": "auto" if options.plain else Strategy(seed=SEED),
            "accelerator": "cpu",
            "max_epochs": 4,
            "precision": "64-true",
            "callbacks": [watch, saving, every, *[stopping] * options.stop],
            "logger": CSVLogger(folder, flush_logs_every_n_steps=1),
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **json.loads(options.set),
        }
    )
    trainer.fit(
        module,
        DataLoader(numbers, BATCH, **sampler),
        DataLoader(Numbers(30), 4),
        ckpt_path=options.resume or None,
    )
    torch.save(
        {
            "model": module.state_dict(),
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "steps": watch.steps,
            "logged": watch.logged,
            "best": float(saving.best_model_score or 0.0),
            "kept": sorted(Path(path).name for path in saving.best_k_models),
            "files": sorted(path.name for path in (folder / "every").glob("*")),
            "wrote": os.path.exists(os.path.join(trainer.logger.log_dir, "metrics.csv"))
            and trainer.is_global_zero,
            "pid": os.getpid(),
        },
        options.out / f"{'plain' if options.plain else NAME}.pt",
    )


if __name__ == "__main__":
    main()
