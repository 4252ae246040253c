"""What a coordinator costs with many workers: CPU, memory and the time of a regroup.

    python -m bench.many [--workers 50 100 200] [--seconds 20]

`evenstep run --workers 0:N` in a process of its own, and N stand-ins in this one: real sockets and
the real protocol, heartbeats, reported steps, link tests and rendezvous, but no training. What a
rank publishes for the rendezvous is as long as Gloo's own, which is measured first. A regroup lasts
from a worker's loss until all others know each other's addresses; the stand-ins share one core, so
part of it is theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from bench.jobs import BIN, BOUND_S
from bench.tables import markdown
from evenstep import messages as msg
from evenstep.coordinate.run_folder import read_addresses
from evenstep.launch.environment import read_credentials
from evenstep.types import StepReport

HEARTBEAT_S = 1.0
AT_ONCE = 50  # workers that connect at the same time
REPORT_S = 0.5  # the leader's reports to the brain are paced to a few a second
STEP_S = 0.1
GROUPS = ("control", "gradients")  # Gloo groups of a generation
SMALL, LARGE = 4, 16  # ranks with which Gloo's part is measured


class SharedStore(Store):
    """A store of ranks that are threads; it counts what they set."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes | str) -> None:
        with self._changed:
            self.values[key] = value.encode() if isinstance(value, str) else value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: key in self.values)
            return self.values[key]

    def check(self, keys: Any) -> bool:
        with self._changed:
            return all(key in self.values for key in keys)

    def wait(self, keys: Any, timeout: Any = None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: all(key in self.values for key in keys))


def published_bytes(world: int) -> int:
    """What a rank publishes in all, on average, to make one Gloo group of this size."""
    store = SharedStore()
    gloo: Any = ProcessGroupGloo  # not all of it is in torch's stubs

    def make(rank: int) -> None:
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        gloo(store, rank, world, options)

    ranks = [threading.Thread(target=make, args=(rank,)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return sum(map(len, store.values.values())) // world


class StandIn:
    """One worker, as far as the coordinator can tell."""

    def __init__(self, many: Many) -> None:
        self._many = many
        self.id = ""
        self.generation: msg.Generation | None = None
        self.num_heard = 0  # of what others publish in that generation
        self.step = 0
        self._writer: asyncio.StreamWriter
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self) -> None:
        """Connect, and be ready."""
        reader = await self._connect()
        settings = {"batch": {"size": self._many.batch, "min_share": 1}}
        self._say(
            msg.Ready(
                kind="cpu",
                cores=1.0,
                batch=self._many.batch,
                length=10**9,
                prefetched=0,
                model="a model",
                sees_folder=False,
                settings=settings,
            )
        )
        self._tasks = [
            asyncio.create_task(self._listen(reader)),
            asyncio.create_task(self._beat()),
            asyncio.create_task(self._report()),
        ]

    async def _connect(self) -> asyncio.StreamReader:
        reader, self._writer = await asyncio.open_connection(*self._many.address, limit=2**26)
        greeting = await self._hear(reader, msg.Greeting)
        hello = msg.Hello(
            proof=msg.proof(self._many.token, greeting.nonce),
            nonce=secrets.token_hex(16),
            host="standin",
        )
        self._say(hello)
        self.id = (await self._hear(reader, msg.Welcome)).worker
        return reader

    def leave(self) -> None:
        """End as a process does that is killed."""
        for task in self._tasks:
            task.cancel()
        self._writer.transport.abort()

    @property
    def has_met(self) -> bool:
        """Whether it knows the addresses of all others of its generation."""
        generation = self.generation
        if generation is None:
            return False
        return self.num_heard >= (len(generation.roster) - 1) * (len(GROUPS) + 1)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            match msg.to_client.decode(line):
                case msg.Generation() as generation:
                    self.generation, self.num_heard = generation, 0
                    size = self._many.published_bytes(len(generation.roster))
                    for name, num_bytes in {**dict.fromkeys(GROUPS, size), "here": 0}.items():
                        key, value = f"{name}/{self.id}", bytes(num_bytes)
                        said = msg.Publish(generation=generation.number, key=key, value=value)
                        self._say(said)
                    if generation.roster[:1] == (self.id,):
                        self._say(msg.Began(generation=generation.number, step=self.step))
                case msg.Published(generation=number):
                    if self.generation is not None and number == self.generation.number:
                        self.num_heard += 1
                        self._many.heard()
                case msg.Listen(probe=probe):
                    self._say(msg.Listening(probe=probe))
                case _:
                    pass

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            number = self.generation.number if self.generation else 0
            self._say(msg.Alive(generation=number, step=self.step, waiting=False))

    async def _report(self) -> None:
        """As the leader does."""
        while True:
            await asyncio.sleep(REPORT_S)
            told = self.generation
            if told is None or told.roster[:1] != (self.id,) or not self.has_met:
                continue
            self.step += 1
            reports = tuple(
                StepReport(worker, share, STEP_S)
                for worker, share in zip(told.roster, told.shares, strict=True)
            )
            step = msg.Stepped(
                generation=told.number, step=self.step, seconds=STEP_S, reports=reports
            )
            self._say(step)

    async def _hear(self, reader: asyncio.StreamReader, kind: type[Any]) -> Any:
        message = msg.to_client.decode(await reader.readline())
        if not isinstance(message, kind):
            raise SystemExit(f"expected {kind.__name__}, got {message}")
        return message

    def _say(self, message: msg.FromClient) -> None:
        self._writer.write(msg.from_client.encode(message))


class Many:
    """N stand-ins of one run."""

    def __init__(self, run: Path, num: int, published: tuple[int, int]) -> None:
        self.num, self.batch = num, 64 * num
        host, _, port = read_addresses(run)[0].rpartition(":")
        self.address = (host, int(port))
        self.token = read_credentials(run / "token").token
        self.workers = [StandIn(self) for _ in range(num)]
        self._published = published
        self._heard = asyncio.Event()

    def published_bytes(self, world: int) -> int:
        """Gloo's ranks publish an address, and a number for each other rank."""
        small, large = self._published
        return small + (large - small) * (world - SMALL) // (LARGE - SMALL)

    def heard(self) -> None:
        self._heard.set()

    async def join(self) -> None:
        """Some at once: more would not prove themselves in time, on the stand-ins' one core."""
        for first in range(0, self.num, AT_ONCE):
            await asyncio.gather(*(w.join() for w in self.workers[first : first + AT_ONCE]))

    async def until_met(self, num: int) -> None:
        """Wait until so many are in one generation and know each other's addresses."""
        while True:
            there = [w.generation for w in self.workers if w.generation is not None and w.has_met]
            numbers = {generation.number for generation in there}
            if len(there) == num == len(there[0].roster) and len(numbers) == 1:
                return
            self._heard.clear()
            await asyncio.wait_for(self._heard.wait(), BOUND_S)

    def lose(self, worker: StandIn) -> None:
        worker.leave()
        self.workers.remove(worker)


async def measure(run: Path, coordinator: psutil.Process, num: int, seconds: float) -> list[str]:
    """One row: a quiet stretch of training, then a loss."""
    empty_bytes = coordinator.memory_info().rss
    many = Many(run, num, (published_bytes(SMALL), published_bytes(LARGE)))
    await many.join()
    await many.until_met(num)
    await asyncio.sleep(HEARTBEAT_S)
    before, began_s = coordinator.cpu_times(), time.monotonic()
    await asyncio.sleep(seconds)
    after, passed_s = coordinator.cpu_times(), time.monotonic() - began_s
    steady = _cpu_s(after) - _cpu_s(before)
    full_bytes = coordinator.memory_info().rss
    regroups, cpu = [], []
    for _ in range(3):
        before, began_s = coordinator.cpu_times(), time.monotonic()
        many.lose(many.workers[-1])
        await many.until_met(len(many.workers))
        regroups.append(time.monotonic() - began_s)
        cpu.append(_cpu_s(coordinator.cpu_times()) - _cpu_s(before))
        await asyncio.sleep(HEARTBEAT_S)
    for worker in many.workers:
        worker.leave()
    sent = num * num * many.published_bytes(num) * len(GROUPS)
    return [
        f"{num}",
        f"{100 * steady / passed_s:.1f} %",
        f"{1e6 * steady / passed_s / num:.0f} µs/s",
        f"{(full_bytes - empty_bytes) / num / 1024:.0f} KiB",
        f"{sorted(regroups)[1]:.2f} s",
        f"{sorted(cpu)[1]:.2f} s",
        f"{sent / 1e6:.0f} MB",
    ]


def _cpu_s(times: Any) -> float:
    return float(times.user + times.system)


def one(num: int, seconds: float) -> list[str]:
    """A coordinator of its own for N workers."""
    with tempfile.TemporaryDirectory() as folder:
        run, script = Path(folder) / "run", Path(folder) / "train.py"
        script.write_text("")
        command = [str(BIN / "evenstep"), "run", "--workers", f"0:{num}", "--run", str(run)]
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(
                [*command, "--restarts", "0", str(script)], stdout=log, stderr=log
            )
        try:
            while not read_addresses(run)[0]:
                if process.poll() is not None:
                    raise SystemExit((Path(folder) / "log").read_text())
                time.sleep(0.05)
            return asyncio.run(measure(run, psutil.Process(process.pid), num, seconds))
        finally:
            process.kill()
            process.wait()


def main() -> None:
    """Print one row for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[50, 100, 200])
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    header = ["workers", "CPU", "a worker", "memory a worker", "regroup", "its CPU", "it passes on"]
    rows: list[list[str]] = []
    for num in args.workers:
        rows.append(one(num, args.seconds))
        print(markdown(header, rows[-1:]), flush=True)
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
