"""Ranks that train on request, so that several ways to train can take turns of a few steps.

Other load on the machine, and drift of its speed, then affect all of them.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from evenstep.emulate import Quota

END_S = 20.0
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": "67108864",
}
"""For all ranks: malloc keeps freed memory. Returning pages and faulting them in again makes steps
half as long again on this machine, and less even."""


class Ranks:
    """Processes of `bench.rank`, each with its own CPU quota once `limit` is called."""

    def __init__(
        self,
        args: Sequence[str],
        world: int,
        cleanup: ExitStack,
        env: Mapping[str, str] | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self._cleanup = cleanup
        self._ranks: list[subprocess.Popen[str]] = []
        for rank in range(world):
            own = {"RANK": str(rank), "OMP_NUM_THREADS": "1", **(env or {})}
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.rank", *args],
                env={**os.environ, **KEEP_MEMORY, **shared, **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            cleanup.callback(_end, process)
            self._ranks.append(process)

    @property
    def pids(self) -> list[int]:
        """Their processes, by rank."""
        return [rank.pid for rank in self._ranks]

    def kill(self) -> None:
        """End them at once, whatever they do."""
        for rank in self._ranks:
            rank.kill()

    def limit(self, cores: Sequence[float]) -> None:
        """Give each rank a firm quota and pin it to a CPU."""
        for rank, own, cpu in zip(self._ranks, cores, assign_cpus(cores), strict=True):
            quota = self._cleanup.enter_context(Quota(math.inf, firm=True))
            quota.add(rank.pid)
            quota.set(own)
            for thread in Path(f"/proc/{rank.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {cpu})

    def ask(self, *lines: object) -> list[Any]:
        """Send a line to each rank, or one to all. Returns their answers."""
        for i, rank in enumerate(self._ranks):
            assert rank.stdin is not None
            rank.stdin.write(f"{lines[i if len(lines) > 1 else 0]}\n")
            rank.stdin.flush()
        return [_answer(rank) for rank in self._ranks]


def assign_cpus(cores: Sequence[float]) -> list[int]:
    """A CPU for each rank: the largest rank first, each on the least loaded CPU.

    Left to itself, the kernel sometimes puts a rank that needs a whole CPU next to another one.
    """
    taken = dict.fromkeys(sorted(os.sched_getaffinity(0)), 0.0)
    chosen = [0] * len(cores)
    for rank in sorted(range(len(cores)), key=lambda rank: -cores[rank]):
        chosen[rank] = min(taken, key=lambda cpu: taken[cpu])
        taken[chosen[rank]] += cores[rank]
    return chosen


def _answer(rank: subprocess.Popen[str]) -> Any:
    assert rank.stdout is not None
    line = rank.stdout.readline()
    if not line:
        raise SystemExit(f"a rank ended with {rank.wait()}")
    return json.loads(line)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
