"""Real disks that can be filled or fail, in mount namespaces of their own.

A process holds the namespace and ends with its parent, and the disk with it: nothing is left behind
even if the tests are killed.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import SkipTest

SMALL = 'mount -t tmpfs -o size=%s none "$0"'
# An ext4 that believes to have more room than the tmpfs that stores it. It has a single block group
# with all its tables written, so that only the contents of files fail, not the file system.
THIN = """mount -t tmpfs -o size=%s none "$0" && cd "$0" && truncate -s 64m image && mkdir disk &&
PATH="$PATH:/usr/sbin:/sbin" mkfs.ext4 -q -O ^has_journal -m 0 -b 4096 -N 1024 \\
    -E lazy_itable_init=0,nodiscard image &&
mount -o loop,nodelalloc,errors=remount-ro image disk"""
EXT4_SHUTDOWN, NO_FLUSH = 0x8004587D, 2


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


class FailingDisk(Disk):
    """A file system at `path` in which writes fail while the disk below it is full.

    They fail when they are synced: until then they are only in memory.
    """

    def __init__(self, below: Path, mounts: Path) -> None:
        super().__init__(below)
        self.path = below / "disk"
        (self._device,) = [
            Path(device).name
            for device, where, kind, *_ in map(str.split, mounts.read_text().splitlines())
            if kind == "ext4" and where.endswith(f"{below.name}/disk")
        ]

    def make_read_only(self) -> None:
        """As the kernel does after an error of the disk, whatever is open; for good."""
        Path(f"/sys/fs/ext4/{self._device}/trigger_fs_error").write_text("injected")

    def shut_down(self) -> None:
        """Let everything fail with EIO, for good."""
        folder = os.open(self.path, os.O_RDONLY)
        fcntl.ioctl(folder, EXT4_SHUTDOWN, struct.pack("I", NO_FLUSH))
        os.close(folder)


@contextmanager
def small_disk(folder: Path, size: str = "2m") -> Iterator[Disk]:
    """A disk, reached through the process that holds its namespace. SkipTest: not here."""
    with _mounted(folder, SMALL % size) as holder:
        yield Disk(Path(f"/proc/{holder}/root{os.path.realpath(folder)}"))


@contextmanager
def failing_disk(folder: Path, size: str = "8m") -> Iterator[FailingDisk]:
    """Likewise, with an ext4 on it."""
    with _mounted(folder, THIN % size) as holder:
        below = Path(f"/proc/{holder}/root{os.path.realpath(folder)}")
        yield FailingDisk(below, Path(f"/proc/{holder}/mounts"))


@contextmanager
def _mounted(folder: Path, mount: str) -> Iterator[int]:
    folder.mkdir(parents=True)
    holder = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", f"{mount} && echo mounted && exec cat", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != b"mounted\n":
            raise SkipTest("no such file system can be mounted here")
        yield holder.pid
    finally:
        holder.communicate()
