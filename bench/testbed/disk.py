"""A real disk that can be filled: a small tmpfs in a mount namespace of its own.

A process holds the namespace and ends with its parent, and the disk with it: nothing is left behind
even if the tests are killed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import SkipTest

HOLD = 'mount -t tmpfs -o size=%s none "$0" && echo mounted && exec cat'


class Disk:
    """A file system of limited size at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        """Leave no room for another byte."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (2**16, 2**12, 1):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def free(self) -> None:
        self._filler.unlink()


@contextmanager
def small_disk(folder: Path, size: str = "2m") -> Iterator[Disk]:
    """A disk, reached through the process that holds its namespace. SkipTest: not here."""
    folder.mkdir(parents=True)
    holder = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", HOLD % size, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != b"mounted\n":
            raise SkipTest("no file system can be mounted here")
        yield Disk(Path(f"/proc/{holder.pid}/root{os.path.realpath(folder)}"))
    finally:
        holder.communicate()
