"""CPU quotas through cgroups, version 1 or 2."""

from __future__ import annotations

import errno
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evenstep.errors import EvenstepError, InvalidInputError

log = logging.getLogger(__name__)

MIN_QUOTA_US = 1_000  # the kernel rejects less, whatever the period
MAX_PERIOD_US = 1_000_000
PERIOD_US = 8_000  # two ticks of most kernels (4 ms); shorter periods were measured to be inexact

REMOVE_S = 1.0  # for dying processes to leave a group


class NoQuotaError(EvenstepError, OSError):
    """This machine, or this user, cannot set CPU quotas."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return (
            f"no CPU quotas: {self.problem}. They need Linux, the cpu controller of cgroups, "
            "and root (or a writable cgroup). Without them, throttle in process: emulate.Throttle."
        )


def bandwidth_us(cores: float) -> tuple[int, int]:
    """Quota and period for this many cores; the quota is -1 for `inf`.

    The period is longer than PERIOD_US where the kernel would reject the quota as too small.
    """
    if cores == math.inf:
        return -1, PERIOD_US
    if not cores * MAX_PERIOD_US >= MIN_QUOTA_US:
        raise InvalidInputError("cores", f"must be 0.001 or more, got {cores}")
    period_us = max(PERIOD_US, math.ceil(MIN_QUOTA_US / cores))
    return max(MIN_QUOTA_US, round(cores * period_us)), period_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """The cgroup tree that has the cpu controller."""

    root: Path
    version: Literal[1, 2]

    @classmethod
    def find(cls, mounts: Path = Path("/proc/mounts")) -> Hierarchy:
        """The tree of this machine, from its mounts; NoQuotaError if it has none."""
        try:
            rows = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()]
        except OSError as e:
            raise NoQuotaError(f"{mounts} cannot be read ({e.strerror})") from None
        for _, mount, kind, options, *_ in rows:
            root = Path(mount.replace("\\040", " "))
            if kind == "cgroup" and "cpu" in options.split(","):
                return cls(root=root, version=1)
            if kind == "cgroup2" and "cpu" in _words(root / "cgroup.controllers"):
                return cls(root=root, version=2)
        raise NoQuotaError("no cgroup tree with the cpu controller is mounted")

    def create(self, name: str) -> Path:
        """A new group without a limit."""
        group = self.root / name
        try:
            control = self.root / "cgroup.subtree_control"
            if self.version == 2 and "cpu" not in _words(control):
                control.write_text("+cpu")
            group.mkdir()
        except OSError as e:
            raise NoQuotaError(f"{group} cannot be created ({e.strerror})") from e
        return group

    def limit(self, group: Path, cores: float) -> None:
        """Limit the group to this many cores; `inf` for no limit. It may have running processes."""
        quota_us, period_us = bandwidth_us(cores)
        if self.version == 2:
            (group / "cpu.max").write_text(f"{'max' if quota_us < 0 else quota_us} {period_us}")
            return
        quota, period = group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"
        if period.read_text().strip() != str(period_us):
            quota.write_text("-1")  # the kernel may reject the old quota with the new period
            period.write_text(str(period_us))
        quota.write_text(str(quota_us))

    def prefer(self, group: Path) -> None:
        """Schedule this group before everything else on the machine."""
        file, highest = ("cpu.shares", 262_144) if self.version == 1 else ("cpu.weight", 10_000)
        (group / file).write_text(str(highest))

    def pids(self, group: Path) -> list[int]:
        """The processes in a group; empty if the group is gone."""
        return [int(pid) for pid in _words(self.procs(group))]

    def procs(self, group: Path) -> Path:
        """The file that lists the group's processes, and takes the pid of one that moves in."""
        return group / "cgroup.procs"

    def put(self, pid: int, group: Path) -> bool:
        """Move a process and its threads into a group. False: no such process."""
        try:
            self.procs(group).write_text(str(pid))
        except ProcessLookupError:
            return False
        return True

    def remove(self, group: Path) -> bool:
        """Move the group's processes out and remove it. False: it stayed busy."""
        deadline_s = time.monotonic() + REMOVE_S
        while True:
            try:
                for pid in self.pids(group):
                    self.put(pid, self.root)
                group.rmdir()
            except FileNotFoundError:
                return True
            except OSError as e:
                # A dying process cannot be moved, but will be gone soon.
                if e.errno != errno.EBUSY or time.monotonic() > deadline_s:
                    log.warning("cannot remove the CPU quota %s: %s", group, e.strerror)
                    return False
                time.sleep(0.01)
            else:
                return True


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        return []
