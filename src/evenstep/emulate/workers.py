"""Runs copies of a command as uneven workers on one machine, for the bench, the demo and tests.

However a run ends, its processes and its quotas end with it.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import wait
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryFile, gettempdir
from typing import Literal

from evenstep.emulate.cgroup import NoQuotaError, bandwidth_us
from evenstep.emulate.quota import Quota, new_name, orphans
from evenstep.emulate.schedule import Schedule, ScheduleRunner, steady
from evenstep.emulate.worker_api import FOLDER_VARIABLE, START, ready_mark, set_cores
from evenstep.errors import EvenstepError, InvalidInputError
from evenstep.launch.die_with_parent import die_with_parent
from evenstep.launch.environment import torchrun_variables

log = logging.getLogger(__name__)

Method = Literal["quota", "throttle", "none"]

POLL_S = 0.02
GRACE_S = 2.0  # after a failure, for the other workers to report it themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """How one worker ended, and how it was slowed down."""

    rank: int
    exit_code: int  # negative: the signal that killed it
    output: str  # standard output and error, interleaved
    method: Method  # none: it never lined up, or never asked for its throttle
    stopped: bool = False  # killed by `run_uneven`


class UnevenRunError(EvenstepError, RuntimeError):
    """A worker failed, or the run timed out. `results` holds what is known of each worker."""

    def __init__(
        self, problem: str, results: list[WorkerResult], failed_rank: int | None = None
    ) -> None:
        super().__init__(problem, results, failed_rank)
        self.problem, self.results, self.failed_rank = problem, results, failed_rank

    def __str__(self) -> str:
        results = sorted(self.results, key=lambda r: r.rank != self.failed_rank)
        outputs = (f"\n--- worker {r.rank} ({r.exit_code}):\n{r.output[-4000:]}" for r in results)
        return f"{self.problem}{''.join(outputs)}"


def run_uneven(
    command: Sequence[str],
    cores: Sequence[float] | Schedule,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    method: Literal["quota", "throttle"] | None = None,
    firm: bool = False,
    line_up: bool = False,
    check: bool = True,
) -> list[WorkerResult]:
    """Run one copy of `command` per entry of `cores` until all exit; results by rank.

    Each copy gets torchrun's environment, overridden by `env`, and its own CPU quota. Without the
    rights to set quotas, workers throttle themselves (`emulate.own_throttle`), unless `method`
    requires quotas. `firm`: the kernel serves the workers before everything else. `line_up`:
    quotas and schedule start when all workers have called `emulate.line_up`. If a worker fails or
    the run times out, all workers are killed; `check` raises UnevenRunError, which shows the first
    worker that failed on top.
    """
    schedule = cores if isinstance(cores, Schedule) else steady(cores)
    if not command:
        raise InvalidInputError("command", "is empty; give the program and its arguments")
    for level in chain(*schedule.levels):
        bandwidth_us(level)  # reject invalid cores before anything starts
    with ExitStack() as cleanup:
        folder = _make_folder(cleanup)
        quotas = _make_quotas(schedule.num_workers, method, firm, cleanup)
        workers = _Workers(folder, quotas, timeout_s)
        torchrun = {**torchrun_variables(len(quotas)), "OMP_NUM_THREADS": "1"}
        shared = {**os.environ, **torchrun, FOLDER_VARIABLE: str(folder), **(env or {})}
        for rank, quota in enumerate(quotas):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = cleanup.enter_context(WorkerProcess(rank, command, own, quota))
            workers.running.append(process)
        if not line_up or workers.watch(workers.lined_up):
            with ScheduleRunner(schedule, workers.limit):
                (folder / START).touch()
                workers.watch()
        results = workers.finish()
    if check and workers.problem:
        raise UnevenRunError(workers.problem, results, workers.failed_rank)
    return results


class WorkerProcess:
    """Runs a command, with or without a quota, until it exits, `end` is called, or we die.

    `pidfd` becomes readable when the command exits. The thread that creates this object must
    outlive it: the kernel kills the command when that thread ends.
    """

    def __init__(
        self, rank: int, command: Sequence[str], env: Mapping[str, str], quota: Quota | None
    ) -> None:
        self.rank, self._quota = rank, quota
        self._output = TemporaryFile()  # noqa: SIM115  a pipe would have to be drained
        wrapped = die_with_parent(command)
        self._process = subprocess.Popen(
            quota.wrap(wrapped) if quota else wrapped,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,  # a process group of its own, killed as one
        )
        self.pidfd = os.pidfd_open(self._process.pid)

    def end(self) -> int:
        """Kill the command and its descendants if it still runs. Returns the exit code."""
        if self._process.returncode is None:
            # Not reaped yet, so its process group id cannot have been reused.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for pid in self._quota.pids() if self._quota else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # descendants that left the process group
            self._process.wait()
            os.close(self.pidfd)
        return self._process.returncode

    def output(self) -> str:
        """Standard output and error so far."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._output.close()


class _Workers:
    """The workers of one run: which still run, which were slowed down, and the first failure."""

    def __init__(self, folder: Path, quotas: Sequence[Quota | None], timeout_s: float) -> None:
        self._folder, self._quotas = folder, quotas
        self._timeout_s, self._deadline_s = timeout_s, time.monotonic() + timeout_s
        self._limited: set[int] = set()
        self.running: list[WorkerProcess] = []
        self._ended: list[WorkerProcess] = []
        self.problem = ""
        self.failed_rank: int | None = None
        self._set([math.inf] * len(quotas))

    def limit(self, levels: Sequence[float]) -> None:
        """Set each worker's cores, by quota or through its `cores-<rank>` file."""
        self._set(levels)
        self._limited.update(worker.rank for worker in self.running)

    def lined_up(self) -> bool:
        """Whether all workers that still run wait at the start barrier."""
        return all(ready_mark(self._folder, w.rank).exists() for w in self.running)

    def watch(self, done: Callable[[], bool] | None = None) -> bool:
        """Wait until `done` or until all workers have ended. False: a worker failed, or timeout."""
        while self.running and not (done and done()):
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                self.problem = self.problem or f"the workers took over {self._timeout_s:g} s"
                break
            exited = wait([w.pidfd for w in self.running], min(left_s, POLL_S) if done else left_s)
            for worker in [w for w in self.running if w.pidfd in exited]:
                self._note_end(worker)
        return not self.problem

    def finish(self) -> list[WorkerResult]:
        """Kill the workers that still run. Returns all results, by rank."""
        return [
            WorkerResult(
                rank=worker.rank,
                exit_code=worker.end(),
                output=worker.output(),
                method=self._method(worker.rank),
                stopped=worker in self.running,
            )
            for worker in sorted(self._ended + self.running, key=lambda w: w.rank)
        ]

    def _note_end(self, worker: WorkerProcess) -> None:
        self.running.remove(worker)
        self._ended.append(worker)
        exit_code = worker.end()
        if exit_code and not self.problem:
            self.failed_rank = worker.rank
            self.problem = f"worker {worker.rank} ended with {exit_code}"
            self._deadline_s = min(self._deadline_s, time.monotonic() + GRACE_S)

    def _set(self, levels: Sequence[float]) -> None:
        for rank, (quota, cores) in enumerate(zip(self._quotas, levels, strict=True)):
            if quota is not None:
                quota.set(cores)
            else:
                set_cores(self._folder, rank, cores)

    def _method(self, rank: int) -> Method:
        if rank not in self._limited:
            return "none"
        if self._quotas[rank] is not None:
            return "quota"
        return "throttle" if (self._folder / f"throttled-{rank}").exists() else "none"


def _make_folder(cleanup: ExitStack) -> Path:
    for orphan in orphans(Path(gettempdir())):
        rmtree(orphan, ignore_errors=True)
    folder = Path(gettempdir()) / new_name()
    folder.mkdir(mode=0o700)
    cleanup.callback(rmtree, folder, ignore_errors=True)
    return folder


def _make_quotas(
    num_workers: int, method: Literal["quota", "throttle"] | None, firm: bool, cleanup: ExitStack
) -> Sequence[Quota | None]:
    if method == "throttle":
        return [None] * num_workers
    try:
        return [cleanup.enter_context(Quota(math.inf, firm=firm)) for _ in range(num_workers)]
    except NoQuotaError as e:
        if method == "quota":
            raise
        log.warning("%s The workers have to throttle themselves.", e)
        return [None] * num_workers
