"""A small training script for fault injection: double precision, with every kind of state.

With `--epochs 0` the run is held: it trains until a file `go` exists, then finishes that epoch.

FAULTS is a JSON list of [who, point, step], where `who` is a worker's name, "leader" or e.g.
"rank2". The script sends itself SIGKILL at each of these points, once per fault. While a run goes
on, `post` plans one more: whoever reaches the point first, or "leader" or "rank2", is killed there,
raises an error, or exits.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import evenstep
from bench.testbed.ledger import Ledger
from evenstep.emulate import DeviceCurve
from evenstep.train.failpoint import on_failpoint
from evenstep.train.reduce.bucket import FIRST_BUCKET_BYTES

# Workers that `evenstep join` starts have no name yet, and there may be several of them.
JOINED = f"joined-{os.getpid()}" if "EVENSTEP_COORDINATOR" in os.environ else "alone"
NAME = os.environ.get("EVENSTEP_WORKER", JOINED)
ENDLESS = 1_000_000
POSTED, INJECTED = "posted-", "an injected failure of the script"
HELD_S = 0.02  # added to held steps, so that the reference run has fewer of them to repeat


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Distinct random samples."""

    def __init__(self, num: int) -> None:
        rng = torch.Generator().manual_seed(1)
        self.x = torch.randn(num, 8, generator=rng, dtype=torch.float64)
        self.y = (self.x.sum(1, keepdim=True) * 0.3).tanh()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Hold:
    """The length of a run: a number of epochs or, if 0, until a file `go` exists."""

    def __init__(self, session: evenstep.Session, out: Path, num_epochs: int) -> None:
        self._session, self._go = session, out / "go"
        self._test = Path("/proc", os.environ.get("HELD_BY", "self"))
        self._until_go = num_epochs == 0
        self._witness = os.environ.get("WITNESS", "")  # a file of all steps of all clusters
        self.num_epochs = num_epochs or ENDLESS

    @property
    def is_on(self) -> bool:
        """Whether the run is still held, by a test process that is still alive."""
        return self._until_go and not self._go.exists() and self._test.exists()

    def step(self) -> None:
        """Slow down a held step, and write it down. Called before the backward pass."""
        if self.is_on:
            time.sleep(HELD_S)
        if self._witness:
            with open(self._witness, "a") as file:
                file.write(f"{os.environ['CLUSTER']} {self._session.step}\n")

    def sleep(self, point: str, here: str) -> None:
        """Sleep at this point of a held run."""
        if point == here and self.is_on:
            logging.info("asleep")
            time.sleep(600.0)

    def wait_for(self, name: str) -> None:
        """Wait for a file, while the run is held."""
        while self.is_on and not self._go.with_name(name).exists():
            time.sleep(0.005)

    def is_over(self) -> bool:
        """At the end of an epoch: whether it was the last. The same answer on all workers."""
        return self._until_go and not self._session.sum(float(self.is_on))


class Faults:
    """Kills this process at the points that FAULTS names."""

    def __init__(self, out: Path) -> None:
        self._out, self._planned = out, json.loads(os.environ.get("FAULTS", "[]"))
        self.session: evenstep.Session | None = None

    def at(self, point: str) -> None:
        """Kill this process if a fault is planned here and has not fired yet."""
        session = self.session
        self._claim(f"any-{point}")
        if session is None:
            return
        self._claim(f"rank{session.rank}-{point}")
        who = {NAME, f"rank{session.rank}", "leader" if session.is_leader else ""}
        at_hand = session._step.number
        for name, where, step in self._planned:
            if name in who and where == point and step in (at_hand, -1):
                try:
                    (self._out / f"fault-{name}-{where}-{step}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)

    def _claim(self, name: str) -> None:
        """Do what was posted under a name, if nobody has done it yet."""
        path = self._out / f"{POSTED}{name}"
        try:
            action = path.read_text()
            path.unlink()  # only one process succeeds
        except FileNotFoundError:
            return
        if action == "raise":
            raise RuntimeError(INJECTED)
        if action == "exit":
            sys.exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


def post(out: Path, who: str, point: str, action: str) -> Path:
    """Plan a fault in a run that goes on; the file is there until somebody does it."""
    path = out / f"{POSTED}{who}-{point}"
    part = path.with_name(f"part-{who}-{point}")
    part.write_text(action)
    part.rename(path)
    return path


class Ballast(nn.Module):
    """Cheap parameters of a given size; by default they fill the first bucket."""

    def __init__(self, num_bytes: int = FIRST_BUCKET_BYTES) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_bytes // 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.mean()


def install_faults(faults: Faults, model: nn.Module) -> None:
    """Enable faults at evenstep's failpoints and once the first bucket is in flight."""
    on_failpoint(faults.at)
    trained = next(p for p in model.parameters() if p.requires_grad)
    trained.register_hook(lambda grad: faults.at("bucket"))


def main() -> None:
    """Train and save the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=3, help="0: until `go`")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds added to every step")
    parser.add_argument("--per-worker", type=int, default=0, help="batch per worker, up to --limit")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--per-sample", type=float, default=0.0, help="emulated s, while held")
    parser.add_argument("--floor", type=float, default=0.0, help="minimum emulated step time in s")
    parser.add_argument("--slow", default="", help="workers slowed down threefold, while held")
    parser.add_argument("--slow-from", type=int, default=0, help="step at which --slow begins")
    parser.add_argument("--sum", action="store_true", help="call session.sum in every step")
    parser.add_argument("--prints", type=int, default=0, help="characters printed in every step")
    parser.add_argument("--asleep", default="", help="POINT-STEP at which held workers sleep")
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    torch.manual_seed(3)
    torch.set_num_threads(1)
    model: nn.Module = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), Ballast(), nn.Linear(16, 1)
    ).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
    faults = Faults(args.out)
    steps: list[tuple[int, int]] = []  # committed on this worker: number and global batch
    install_faults(faults, model)
    faults.at("start")
    with evenstep.join() as session:
        faults.session = session
        model, optimizer, scheduler = session.prepare(
            model, optimizer, scheduler, sync_batchnorm=True
        )
        grows = {"per_worker": args.per_worker, "limit": args.limit}
        loader = session.loader(
            Numbers(args.samples),
            **(grows if args.per_worker else {"batch": args.batch}),
            num_workers=args.loader_workers,
        )
        device = DeviceCurve(per_sample_s=args.per_sample, floor_s=args.floor)
        hold, ledger, num_epochs = Hold(session, args.out, args.epochs), Ledger(session), 0
        faults.at("joined")
        for epoch in session.epochs(hold.num_epochs):
            for x, y in loader:
                if session.samples // args.samples != epoch:
                    raise AssertionError(f"{session.samples} samples used in epoch {epoch}")
                faults.at("forward")
                if not steps:
                    faults.at("first")
                begun_s, batch = time.monotonic(), session.batch
                hold.sleep(args.asleep, f"forward-{session.step}")
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                time.sleep(args.pause)
                hold.step()
                if hold.is_on:
                    slow = NAME in args.slow.split(",") and session.step >= args.slow_from
                    device.slowed(3.0 if slow else 1.0).run(session.counted, begun_s)
                ledger.begin(x[: session.counted, 0].tolist())
                faults.at("backward")
                loss.backward()
                faults.at("reduced")
                if args.sum:
                    session.sum(loss)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if not session.void:
                    ledger.commit()
                faults.at("stepped")
                if args.prints:
                    print("x" * args.prints, flush=True)
                hold.sleep(args.asleep, f"stepped-{session.step - 1}")
                scheduler.step()
                if not session.void:
                    steps.append((session.step - 1, batch))
            num_epochs = epoch + 1
            faults.at("epoch")
            if session._roster.is_late:  # a former spare: the others are in a later epoch
                logging.info("epoch %d is over, the run is at step %d", epoch, session.step)
                continue
            before = session.world
            # Summing the epoch number shows whether all workers are in the same epoch.
            there = float(session.sum(float(epoch + 1))) / (epoch + 1)
            if not (there.is_integer() and session.world <= there <= max(before, session.world)):
                raise AssertionError(f"{there} workers in a sum of {before}, then {session.world}")
            logging.info("epoch %d, step %d: %g here", epoch, session.step, there)
            if hold.is_over():
                break
        torch.save(
            {
                "model": model.state_dict(),
                "lr": optimizer.param_groups[0]["lr"],
                "step": session.step,
                "steps": steps,
                "samples": session.samples,
                "epochs": num_epochs,
            },
            args.out / f"{NAME}.pt",
        )


if __name__ == "__main__":
    main()
