"""`with_lightning_plain.py` on evenstep."""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.adapters.lightning import Strategy

BATCH = 24


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("loss", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(250, 8)
    train, test = TensorDataset(x, x[:, :4].argmax(1)), TensorDataset(x[:50], x[:50, :4].argmax(1))
    model = Classifier()
    trainer = pl.Trainer(
        max_epochs=2,
        strategy=Strategy(),
        precision="64-true",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=ModelCheckpoint(Path(sys.argv[1]).parent, every_n_train_steps=6, save_top_k=-1),
        logger=False,
    )
    train_loader = DataLoader(train, batch_size=BATCH, shuffle=True)
    trainer.fit(model, train_loader, DataLoader(test, batch_size=BATCH))
    if trainer.is_global_zero:
        print(f"held-out loss {float(trainer.callback_metrics['loss']):.3f}")
        torch.save({"model": model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
