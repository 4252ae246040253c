"""Copies of a command as uneven workers of one machine, for the bench, the demo and tests.

Nothing outlives a crew: neither processes nor quotas, however it ends.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import wait
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir
from typing import Literal

from evenstep.emulate.cgroup import NoQuotaError, bandwidth_us
from evenstep.emulate.follow import Follower
from evenstep.emulate.member import Member
from evenstep.emulate.owner import new_name, orphans
from evenstep.emulate.quota import Quota
from evenstep.emulate.schedule import Schedule, steady
from evenstep.emulate.worker import FOLDER
from evenstep.errors import EvenstepError, InvalidInputError

log = logging.getLogger(__name__)

Means = Literal["quota", "throttle", "none"]

LOOK_S = 0.02
GRACE_S = 2.0  # for the others to see a failed peer and say so themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How one worker ended, and by which means it was slowed down."""

    rank: int
    exit_code: int  # negative: the signal that ended it
    output: str  # standard output and error, as they came
    means: Means  # none: it never lined up or took its throttle
    stopped: bool = False  # it did not end by itself


class CrewError(EvenstepError, RuntimeError):
    """A worker failed, or the time was up. `finished` holds what there is of all workers."""

    def __init__(self, problem: str, finished: list[Finished], culprit: int | None = None) -> None:
        super().__init__(problem, finished, culprit)
        self.problem, self.finished, self.culprit = problem, finished, culprit

    def __str__(self) -> str:
        by_blame = sorted(self.finished, key=lambda f: f.rank != self.culprit)
        said = (f"\n--- worker {f.rank} ({f.exit_code}):\n{f.output[-4000:]}" for f in by_blame)
        return f"{self.problem}{''.join(said)}"


def run_uneven(
    command: Sequence[str],
    cores: Sequence[float] | Schedule,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    means: Literal["quota", "throttle"] | None = None,
    firm: bool = False,
    line_up: bool = False,
    check: bool = True,
) -> list[Finished]:
    """Run a copy of `command` for each entry of `cores`, by rank, to its end.

    Each has torchrun's environment, `env` over it, and a CPU quota of its own. Without rights to
    quotas each is told to throttle itself (`emulate.own_throttle`), unless `means` insists.
    `firm`: they get their cores whatever else the machine does. `line_up`: quotas and schedule
    begin when all have called `emulate.line_up`. When one fails, or the time is up, all are
    ended; `check` makes that a CrewError, with the first to fail on top.
    """
    schedule = cores if isinstance(cores, Schedule) else steady(cores)
    if not command:
        raise InvalidInputError("command", "is empty; give the program and its arguments")
    for level in chain(*schedule.levels):
        bandwidth_us(level)  # a wrong number is refused before anything starts
    with ExitStack() as last:
        folder = _folder(last)
        quotas = _quotas(schedule.num_workers, means, firm, last)
        crew = _Crew(folder, quotas, timeout_s)
        shared = {**os.environ, **_torchrun(len(quotas)), FOLDER: str(folder), **(env or {})}
        for rank, quota in enumerate(quotas):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            crew.running.append(last.enter_context(Member(rank, command, own, quota)))
        if not line_up or crew.watch(crew.lined_up):
            with Follower(schedule, crew.limit):
                (folder / "go").touch()
                crew.watch()
        finished = crew.finish()
    if check and crew.problem:
        raise CrewError(crew.problem, finished, crew.culprit)
    return finished


class _Crew:
    """The workers of one run: who still runs, who was slowed down, what went wrong first."""

    def __init__(self, folder: Path, quotas: Sequence[Quota | None], timeout_s: float) -> None:
        self._folder, self._quotas = folder, quotas
        self._timeout_s, self._until_s = timeout_s, time.monotonic() + timeout_s
        self._limited: set[int] = set()
        self.running: list[Member] = []
        self._ended: list[Member] = []
        self.problem = ""
        self.culprit: int | None = None
        self._set([math.inf] * len(quotas))

    def limit(self, levels: Sequence[float]) -> None:
        """Give the workers so many cores from now on, by quota or by telling them."""
        self._set(levels)
        self._limited.update(member.rank for member in self.running)

    def lined_up(self) -> bool:
        """Whether all who still run wait at the line."""
        return all((self._folder / f"here-{m.rank}").exists() for m in self.running)

    def watch(self, done: Callable[[], bool] | None = None) -> bool:
        """Wait until `done`, or until all have ended. False: a problem ends the run."""
        while self.running and not (done and done()):
            left_s = self._until_s - time.monotonic()
            if left_s <= 0:
                self.problem = self.problem or f"the workers took over {self._timeout_s:g} s"
                break
            gone = wait([m.pidfd for m in self.running], min(left_s, LOOK_S) if done else left_s)
            for member in [m for m in self.running if m.pidfd in gone]:
                self._note_end(member)
        return not self.problem

    def finish(self) -> list[Finished]:
        """End those who still run; how each ended, by rank."""
        return [
            Finished(
                rank=member.rank,
                exit_code=member.end(),
                output=member.output(),
                means=self._means(member.rank),
                stopped=member in self.running,
            )
            for member in sorted(self._ended + self.running, key=lambda m: m.rank)
        ]

    def _note_end(self, member: Member) -> None:
        self.running.remove(member)
        self._ended.append(member)
        exit_code = member.end()
        if exit_code and not self.problem:
            self.culprit = member.rank
            self.problem = f"worker {member.rank} ended with {exit_code}"
            self._until_s = min(self._until_s, time.monotonic() + GRACE_S)

    def _set(self, levels: Sequence[float]) -> None:
        for rank, (quota, cores) in enumerate(zip(self._quotas, levels, strict=True)):
            if quota is not None:
                quota.set(cores)
                continue
            fresh = self._folder / f"fresh-{rank}"
            fresh.write_text(str(cores), encoding="utf-8")
            fresh.rename(self._folder / f"cores-{rank}")  # a worker never reads half a number

    def _means(self, rank: int) -> Means:
        if rank not in self._limited:
            return "none"
        if self._quotas[rank] is not None:
            return "quota"
        return "throttle" if (self._folder / f"throttled-{rank}").exists() else "none"


def _folder(last: ExitStack) -> Path:
    for left in orphans(Path(gettempdir())):
        rmtree(left, ignore_errors=True)
    folder = Path(gettempdir()) / new_name()
    folder.mkdir(mode=0o700)
    last.callback(rmtree, folder, ignore_errors=True)
    return folder


def _quotas(
    num_workers: int, means: Literal["quota", "throttle"] | None, firm: bool, last: ExitStack
) -> Sequence[Quota | None]:
    if means == "throttle":
        return [None] * num_workers
    try:
        return [last.enter_context(Quota(math.inf, firm=firm)) for _ in range(num_workers)]
    except NoQuotaError as e:
        if means == "quota":
            raise
        log.warning("%s The workers are told to throttle themselves.", e)
        return [None] * num_workers


def _torchrun(num_workers: int) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
