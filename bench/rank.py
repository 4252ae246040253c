"""One rank of a benchmark: trains a workload with plain DDP or with evenstep and reports times.

Started by the benchmarks, not by hand. The last line that it prints is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import evenstep
from bench.workloads import WORKLOADS, Workload
from evenstep.emulate import DeviceCurve, line_up, own_throttle
from evenstep.train.data.order import Order
from evenstep.train.data.permutation import shuffled
from evenstep.train.data.position import DataPosition
from evenstep.train.data.share_sampler import ShareSampler

Steps = Iterator[tuple[int, float]]
"""Samples of this rank and their mean loss, per step."""


class Device:
    """An emulated device with its slowdowns by step, or none.

    Without quotas, a slower worker is throttled here.
    """

    def __init__(self, spec: str, rank: int) -> None:
        self._throttle = own_throttle()
        plan = json.loads(spec) if spec else {}
        self._curve = DeviceCurve(**plan["curves"][rank]) if plan else None
        self._slowdowns = [(step, row[rank]) for step, row in plan.get("slowdowns", [])]
        self.step = 0

    def work(self, samples: int, started_s: float) -> None:
        """Call between forward and backward: wait as long as the device would compute."""
        if self._curve is not None:
            factors = [factor for step, factor in self._slowdowns if step <= self.step]
            self._curve.slowed(factors[-1] if factors else 1.0).run(samples, started_s)
        else:
            # Before backward, which must not wait and takes about twice as long as forward.
            self._throttle.after(3 * (time.monotonic() - started_s))


def plain(work: Workload, args: argparse.Namespace, device: Device) -> Steps:
    """Steps of plain DDP on given shares; a factor on the loss corrects for uneven ones."""
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shares = tuple(map(int, args.shares.split(",")))
    model = DistributedDataParallel(work.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
    sampler = ShareSampler(Order(shuffled(len(work.data), 0)), lambda _: shares, rank)
    loader = DataLoader(work.data, batch_sampler=sampler)
    factor = shares[rank] * world / sum(shares)
    while True:
        for x, y in loader:
            started_s = time.monotonic()
            optimizer.zero_grad()
            loss = work.loss(model(x), y)
            device.work(shares[rank], started_s)
            (loss if factor == 1 else loss * factor).backward()
            optimizer.step()
            yield shares[rank], loss.item()
        sampler.position = DataPosition(epoch=sampler.position.epoch + 1)


def balanced(work: Workload, args: argparse.Namespace, device: Device) -> Steps:
    """Steps of evenstep, whose policy divides the batch."""
    with evenstep.join(policy=args.way, journal=args.journal) as session:
        optimizer = torch.optim.SGD(work.model.parameters(), lr=work.lr)
        model, optimizer = session.prepare(work.model, optimizer)
        loader = session.loader(work.data, batch=args.batch)
        for _ in session.epochs(1_000_000):
            for x, y in loader:
                started_s = time.monotonic()
                optimizer.zero_grad()
                loss = work.loss(model(x), y)
                device.work(session.counted, started_s)
                loss.backward()
                optimizer.step()
                yield session.counted, loss.item()


def reducing(work: Workload, num: int) -> list[float]:
    """Time the all-reduce of the model's gradients alone, with all ranks ready at once."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    gradients = torch.zeros(sum(p.numel() for p in work.model.parameters()))
    barrier = torch.zeros(1)
    seconds = []
    for _ in range(num):
        time.sleep(0.05)  # long enough for a quota to refill
        torch.distributed.all_reduce(barrier)
        started_s = time.monotonic()
        torch.distributed.all_reduce(gradients)
        seconds.append(time.monotonic() - started_s)
    return seconds


def alone(
    work: Workload, optimizer: torch.optim.Optimizer, device: Device, size: int, num: int
) -> list[float]:
    """Time steps of `size` samples on this worker alone, without reduction."""
    sampler = ShareSampler(Order(shuffled(len(work.data), 0)), partial(_all_of, size), 0)
    batches = iter(DataLoader(work.data, batch_sampler=sampler))
    ends_s = [time.monotonic()]
    for x, y in islice(batches, num):
        started_s = time.monotonic()
        optimizer.zero_grad()
        loss = work.loss(work.model(x), y)
        device.work(size, started_s)
        loss.backward()
        optimizer.step()
        ends_s.append(time.monotonic())
    return [end_s - started_s for started_s, end_s in pairwise(ends_s)]


def _all_of(size: int, _: int) -> tuple[int, ...]:
    return (size,)


def main() -> None:
    """Train for --steps steps, or for the number of steps in each line of standard input.

    With --way alone, a line is the number of samples per step and the number of steps; for no
    samples, these steps are all-reduces of the gradients.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--way", required=True, help="ddp, alone, or a policy of evenstep")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--shares", default="", help="for ddp")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=0, help="0: read from standard input")
    parser.add_argument("--device", default="", help="JSON: curves by rank, slowdowns by step")
    parser.add_argument("--journal", type=Path)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = WORKLOADS[args.workload](args.samples)
    device = Device(args.device, int(os.environ["RANK"]))
    if args.way == "alone":
        optimizer = torch.optim.SGD(work.model.parameters(), lr=work.lr)
        for line in sys.stdin:
            size, num = map(int, line.split())
            run = alone(work, optimizer, device, size, num) if size else reducing(work, num)
            print(json.dumps(run), flush=True)
        os._exit(0)  # as below
    steps = (plain if args.way == "ddp" else balanced)(work, args, device)
    ends_s: list[float] = []
    taken: list[tuple[int, float]] = []

    def take(num: int) -> None:
        for _ in range(num):
            device.step = len(ends_s)
            taken.append(next(steps))
            ends_s.append(time.monotonic())

    if args.steps:
        take(1)  # the first step creates groups and buffers
        line_up()
        take(args.steps)
        result = {
            "ends_s": ends_s,
            "shares": [n for n, _ in taken],
            "losses": [x for _, x in taken],
        }
        print(json.dumps(result), flush=True)
    else:
        for line in sys.stdin:
            started_s = time.monotonic()
            take(int(line))
            took_s = time.monotonic() - started_s
            peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            result = {"seconds": took_s, "peak_bytes": peak_kib * 1024, "share": taken[-1][0]}
            print(json.dumps(result), flush=True)
    steps.close()  # type: ignore[attr-defined]
    if torch.distributed.is_initialized():
        # Skip the interpreter's shutdown, in which DDP's threads sometimes abort the process.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
