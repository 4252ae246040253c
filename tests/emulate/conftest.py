"""Fixtures for tests with real quotas."""

from __future__ import annotations

import math
import select
import subprocess
import sys
from collections.abc import Iterator
from os import close, pidfd_open

import pytest

from evenstep.emulate import Hierarchy, NoQuotaError, Quota

BUSY = """
import sys, time
for line in sys.stdin:
    begun_s, used_s = time.monotonic(), time.process_time()
    while time.monotonic() - begun_s < float(line):
        pass
    print(time.process_time() - used_s, flush=True)
"""


class Busy:
    """A process that computes for a given time and reports its CPU time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", BUSY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def cpu_s(self, wall_s: float) -> float:
        """CPU seconds it gets in `wall_s` seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{wall_s}\n")
        return float(self.process.stdout.readline())


@pytest.fixture
def busy() -> Iterator[Busy]:
    started = Busy()
    yield started
    started.process.kill()
    started.process.communicate()


@pytest.fixture
def hierarchy() -> Hierarchy:
    """This machine's cgroups, if it allows quotas."""
    try:
        with Quota(math.inf):
            return Hierarchy.find()
    except NoQuotaError as e:
        pytest.skip(str(e))


def ends(pid: int, timeout_s: float = 30.0) -> bool:
    """Whether a process, our child or not, ends in time."""
    try:
        watched = pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], timeout_s)[0])
    finally:
        close(watched)
