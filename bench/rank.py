"""One rank of a bench: trains a workload with plain DDP or with evenstep, and tells its times.

Started by the benches, never by hand. The last line of rank 0's output is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import evenstep
from bench.workloads import WORKLOADS, Workload
from evenstep.emulate import DeviceCurve, line_up
from evenstep.train.loader import ShareSampler
from evenstep.train.order import Order

Seconds = float


class Device:
    """An emulated device, or none: its curve, and by how much it is slowed down at which step."""

    def __init__(self, told: str, rank: int) -> None:
        plan = json.loads(told) if told else {}
        self._curve = DeviceCurve(**plan["curves"][rank]) if plan else None
        self._slowdowns = [(step, row[rank]) for step, row in plan.get("slowdowns", [])]
        self.step = 0

    def work(self, samples: int, begun_s: float) -> None:
        """Take as long as the device would for a step on so many samples."""
        if self._curve is None:
            return
        factor = 1.0
        for step, slowdown in self._slowdowns:
            if step <= self.step:
                factor = slowdown
        self._curve.slowed(factor).run(samples, begun_s)


def plain(work: Workload, args: argparse.Namespace, device: Device) -> Iterator[float]:
    """Steps of plain DDP on given shares; the mean is over samples, by a factor on the loss."""
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shares = tuple(map(int, args.shares.split(",")))
    model = DistributedDataParallel(work.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
    sampler = ShareSampler(Order(length=len(work.data), batch=args.batch), lambda _: shares, rank)
    loader = DataLoader(work.data, batch_sampler=sampler)
    even = len(set(shares)) == 1
    while True:
        for x, y in loader:
            begun_s = time.monotonic()
            optimizer.zero_grad()
            loss = work.loss(model(x), y)
            device.work(shares[rank], begun_s)
            (loss if even else loss * (shares[rank] * world / args.batch)).backward()
            optimizer.step()
            yield loss.item()
        sampler.epoch += 1


def balanced(work: Workload, args: argparse.Namespace, device: Device) -> Iterator[float]:
    """Steps of evenstep, which shares out the batch by a policy."""
    shares = {"shares": list(map(int, args.shares.split(",")))} if args.way == "fixed" else {}
    with evenstep.join(policy={"name": args.way, **shares}, journal=args.journal) as session:
        optimizer = torch.optim.SGD(work.model.parameters(), lr=work.lr)
        model, optimizer = session.prepare(work.model, optimizer)
        loader = session.loader(work.data, batch=args.batch)
        for _ in session.epochs(1_000_000):
            for x, y in loader:
                begun_s = time.monotonic()
                optimizer.zero_grad()
                loss = work.loss(model(x), y)
                device.work(session.counted, begun_s)
                loss.backward()
                optimizer.step()
                yield loss.item()


def curve(work: Workload, args: argparse.Namespace, device: Device) -> None:
    """This worker by itself: how long forward and backward take for each size, by its median."""
    told = {}
    for size in map(int, args.sizes.split(",")):
        x, y = (torch.stack(column) for column in zip(*[work.data[i] for i in range(size)]))
        seconds = []
        for _ in range(args.steps):
            begun_s = time.monotonic()
            loss = work.loss(work.model(x), y)
            device.work(size, begun_s)
            loss.backward()
            seconds.append(time.monotonic() - begun_s)
        told[size] = sorted(seconds)[len(seconds) // 2]
    print(json.dumps(told), flush=True)


def main() -> None:
    """Train for so many steps, or for as many as each line of standard input asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--way", required=True, help="ddp, alone, or a policy of evenstep")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--shares", default="", help="for ddp and the policy fixed")
    parser.add_argument("--sizes", default="", help="for alone")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=0, help="0: as standard input asks")
    parser.add_argument("--device", default="", help="JSON: curves by rank, slowdowns by step")
    parser.add_argument("--journal", type=str)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    work = WORKLOADS[args.workload](args.samples)
    device = Device(args.device, rank)
    if args.way == "alone":
        line_up()
        curve(work, args, device)
        return
    steps = (plain if args.way == "ddp" else balanced)(work, args, device)
    ends, losses = [], []

    def take(num: int) -> None:
        for _ in range(num):
            device.step = len(ends)
            losses.append(next(steps))
            ends.append(time.monotonic())

    if args.steps:
        take(1)  # groups and buffers are made in the first step
        line_up()
        take(args.steps)
        if rank == 0:
            print(json.dumps({"ends": ends, "losses": losses}), flush=True)
    else:
        for line in sys.stdin:
            begun_s, used_s = time.monotonic(), time.process_time()
            take(int(line))
            took_s, used_s = time.monotonic() - begun_s, time.process_time() - used_s
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps([took_s, used_s, peak]), flush=True)
    steps.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
