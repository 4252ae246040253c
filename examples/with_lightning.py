"""Lightning's Trainer on uneven workers. Two lines differ from a script for one process.

python examples/with_lightning.py
evenstep run --workers 3 examples/with_lightning.py
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.adapters.lightning import Strategy  # 1


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def clusters(num: int, seed: int) -> TensorDataset:
    """Points around four centres."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (num,), generator=rng)
    centres = torch.randn(4, 20, generator=torch.Generator().manual_seed(0))
    return TensorDataset(centres[labels] + torch.randn(num, 20, generator=rng), labels)


def main() -> None:
    torch.manual_seed(0)
    trainer = pl.Trainer(
        max_epochs=3,
        strategy=Strategy(),  # 2
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    train = DataLoader(clusters(4096, 1), batch_size=128, shuffle=True)
    trainer.fit(Classifier(), train, DataLoader(clusters(512, 2), batch_size=128))
    if trainer.is_global_zero:
        print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f}")


if __name__ == "__main__":
    main()
