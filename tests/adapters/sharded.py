"""A host's script: a small model, sharded over two processes with FSDP2, in double precision.

Alone, without a coordinator, it is the reference: one process and a whole model.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

import torch
from bench.testbed.train import NAME, Faults, Hold, Numbers
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import evenstep
from evenstep.adapters import fsdp
from evenstep.train.comm.backend import abort_gloo
from evenstep.train.failpoint import on_failpoint


def net() -> nn.Module:
    """Shards of different sizes, one of them empty."""
    return nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 7), nn.Tanh(), nn.Linear(7, 1))


def main() -> None:
    """Train and save the result, one file for each process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3, help="0: until `go`")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--shares", default="", help="of the hosts, as 17,7")
    parser.add_argument("--cut", action="store_true", help="connections of w1's second process")
    parser.add_argument("--tokens", action="store_true", help="the loss is a mean of tokens")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    torch.set_num_threads(1)
    is_host = "EVENSTEP_COORDINATOR" in os.environ
    torch.manual_seed(3)
    shares = [int(share) for share in args.shares.split(",") if share]
    fixed: Any = {"policy": {"name": "fixed", "shares": shares}} if shares else {}
    with fsdp.join(processes=2, **fixed) if is_host else evenstep.join() as session:
        model = net().double()
        if is_host:
            for layer in list(model.children())[2:]:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
        session.prepare(model, optimizer, scheduler)
        # Rows count between one and five, like sentences of as many tokens.
        tokens = (lambda x: 1 + (x[:, :1] * 100).long().abs() % 5) if args.tokens else None
        weight = (lambda batch: float(tokens(batch[0]).sum())) if tokens else None
        loader = session.loader(Numbers(100), batch=24, weight=weight)
        faults, hold = Faults(args.out), Hold(session, args.out, args.epochs)
        faults.session = session
        on_failpoint(faults.at)
        process = distributed.get_rank() if is_host else 0
        for epoch in session.epochs(hold.num_epochs):
            for window in session.accumulate(loader, args.accumulate):
                for x, y in window:
                    faults.at(f"forward-{process}")
                    if tokens is not None:
                        loss = (mse_loss(model(x), y, reduction="none") * tokens(x)).sum()
                        loss = loss / tokens(x).sum()
                    else:
                        loss = mse_loss(model(x), y)
                    hold.step()
                    faults.at(f"backward-{process}")
                    if args.cut and (NAME, process, session.step) == ("w1", 1, 6):
                        args.cut = False
                        roster: Any = session._roster
                        control = roster._groups.control
                        abort_gloo(control._backend, control.rank, control.world)
                    (loss / len(window)).backward()
                    faults.at(f"reduced-{process}")
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                assert norm > 0.1 or epoch > 2 or session.void, f"{norm}: nothing was clipped"
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                faults.at(f"stepped-{process}")
            if hold.is_over():
                break
        whole = {name: t.full_tensor() if is_host else t for name, t in model.state_dict().items()}
        lr = optimizer.param_groups[0]["lr"]
        result = {"model": whole, "lr": lr, "step": session.step, "world": session.world}
        torch.save(result, args.out / (f"{NAME}-{process}.pt" if is_host else f"{NAME}.pt"))
        if is_host:
            distributed.barrier()  # the fork server ends processes without their exit handlers


if __name__ == "__main__":
    main()
