"""Ranks that train when told to, so that several ways can take turns of a few steps.

Whatever else the machine does, and however its own speed drifts, then meets them all.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from evenstep.emulate import Quota

END_S = 20.0
CALM = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": "67108864",
}
"""For all ranks alike: memory is kept by its process. To give pages back and to touch them anew in
every step takes half as long again here, and each time another while."""


class Crew:
    """Copies of `bench.rank`, by rank, each with a CPU quota of its own from `limit` on."""

    def __init__(self, args: Sequence[str], world: int, last: ExitStack) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self._last = last
        self._ranks: list[subprocess.Popen[str]] = []
        for rank in range(world):
            env = {**os.environ, **CALM, **shared, "RANK": str(rank), "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.rank", *args],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            last.callback(_end, process)
            self._ranks.append(process)

    def limit(self, cores: Sequence[float]) -> None:
        """Give the ranks so many cores from now on, whatever else the machine does."""
        for rank, own, cpu in zip(self._ranks, cores, places(cores), strict=True):
            quota = self._last.enter_context(Quota(math.inf, firm=True))
            quota.add(rank.pid)
            quota.set(own)
            for thread in Path(f"/proc/{rank.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {cpu})

    def tell(self, *lines: object) -> list[Any]:
        """Say a line to each rank, or one to all; what they answer when they are through."""
        for i, rank in enumerate(self._ranks):
            assert rank.stdin is not None
            rank.stdin.write(f"{lines[i if len(lines) > 1 else 0]}\n")
            rank.stdin.flush()
        return [_answer(rank) for rank in self._ranks]


def places(cores: Sequence[float]) -> list[int]:
    """A CPU for each rank, the largest first and where most is left.

    The kernel moves them about, now and then the one that needs a whole CPU beside another: then
    that one has not what its quota says.
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
