"""A loop of Lightning's Fabric, alone or as a worker: a plain loop with evenstep's loader."""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

import torch
from bench.testbed.train import NAME, Ballast, Faults, Numbers, install_faults
from lightning.fabric import Fabric
from torch import nn

import evenstep


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    torch.set_num_threads(1)
    faults = Faults(options.out)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Ballast(), nn.Linear(16, 1))
    install_faults(faults, model)
    fabric = Fabric(accelerator="cpu", devices=1, precision="64-true")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped, wrapped_optimizer = fabric.setup(model, optimizer)
    with evenstep.join() as session:
        faults.session = session
        session.prepare(model, optimizer)
        loader = session.loader(Numbers(96), batch=24)
        for _ in session.epochs(4):
            for window in session.accumulate(loader, 2):
                for x, y in window:
                    faults.at("forward")
                    loss = nn.functional.mse_loss(wrapped(x), y) / len(window)
                    fabric.backward(loss)
                    faults.at("reduced")
                fabric.clip_gradients(wrapped, wrapped_optimizer, max_norm=0.1)
                wrapped_optimizer.step()
                wrapped_optimizer.zero_grad()
                faults.at("stepped")
    torch.save({"model": model.state_dict()}, options.out / f"{NAME}.pt")


if __name__ == "__main__":
    main()
