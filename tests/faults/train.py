"""A small script to be trained under faults: in double precision, with everything that has a state.

It can end itself with SIGKILL at a point of a step: FAULTS is JSON, a list of [worker, point, step].
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import evenstep


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Samples that differ, so that no two of them can be taken for each other."""

    def __init__(self, num: int) -> None:
        chance = torch.Generator().manual_seed(1)
        self.x = torch.randn(num, 8, generator=chance, dtype=torch.float64)
        self.y = (self.x.sum(1, keepdim=True) * 0.3).tanh()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


class Ledger:
    """How often each sample was used, counted by the loop itself; goes along with the run."""

    def __init__(self, num: int) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def fault(session: evenstep.Session, point: str) -> None:
    """End here, if that was asked for."""
    worker = os.environ.get("EVENSTEP_WORKER", "")
    if [worker, point, session.step] in json.loads(os.environ.get("FAULTS", "[]")):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train, and leave the parameters behind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of every step")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    torch.manual_seed(3)
    torch.set_num_threads(1)
    width = args.width
    model = nn.Sequential(
        nn.Linear(8, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 1)
    ).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    per_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
    ledger = Ledger(args.samples)
    with evenstep.join() as session:
        model, optimizer, per_step = session.prepare(
            model, optimizer, per_step, sync_batchnorm=True
        )
        session.register("ledger", ledger)
        loader = session.loader(
            Numbers(args.samples), batch=args.batch, num_workers=args.loader_workers
        )
        for epoch in session.epochs(args.epochs):
            for x, y, _ in loader:
                fault(session, "forward")
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                time.sleep(args.pause)
                fault(session, "backward")
                loss.backward()
                fault(session, "reduced")
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                fault(session, "stepped")
                per_step.step()
                if session.is_leader:
                    (args.out / "step").write_text(str(session.step))
            total = session.sum(torch.tensor([1.0]))
            print(f"epoch {epoch} step {session.step} of {session.world} sum {total}", flush=True)
        parameters = {name: p.detach() for name, p in model.state_dict().items()}
        lr = optimizer.param_groups[0]["lr"]
        name = os.environ.get("EVENSTEP_WORKER", "alone")
        torch.save({"model": parameters, "lr": lr, "step": session.step}, args.out / f"{name}.pt")


if __name__ == "__main__":
    main()
