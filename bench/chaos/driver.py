"""One run: its faults, its end, and the comparison with one process that trained alone."""

from __future__ import annotations

import ctypes
import os
import re
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import torch

from bench.chaos.cluster import BOUND_S, ChaosRun, CrashError, HangError
from bench.chaos.faults import Fault
from bench.chaos.inject import Injector
from bench.chaos.report import Outcome
from bench.testbed.disk import small_disk
from bench.testbed.fork_server import fork_server
from bench.testbed.hosts import make_hosts
from bench.testbed.ledger import lost_and_repeated, read_ledger
from bench.testbed.live_run import SCRIPT, epoch_args, same
from bench.testbed.train import INJECTED

NUM_WORKERS, NUM_LOCAL = 4, 2  # on one host; on the first of several
NUM_HOSTS = 3
DISK = "48m"
CRASH = re.compile(
    r"^(?:\[w\d+\] )?([\w.]+(?:Error|Exception)(?::.*)?)$"  # the end of a traceback
    r"|(.* was ended by SIG(?:SEGV|ABRT|BUS|FPE|ILL)\b.*)$",
    re.MULTILINE,
)


def play(
    faults: Sequence[Fault], folder: Path, *, disk: bool, hosts: bool, until_s: float
) -> Outcome:
    """Inject faults into a run, finish it, and judge it. No new fault after `until_s`."""
    outcome = Outcome(folder=folder, faults=faults, on_hosts=hosts)
    try:
        folder.mkdir(parents=True)
        _play(outcome, disk=disk, until_s=until_s)
    except Exception as e:  # of this program; the other runs go on
        traceback.print_exc()
        outcome.failure = f"the driver failed: {e!r}"
    return outcome


def _play(outcome: Outcome, *, disk: bool, until_s: float) -> None:
    folder, hosts = outcome.folder, outcome.on_hosts
    with ExitStack() as stack:
        space = stack.enter_context(make_hosts(NUM_HOSTS)) if hosts else None
        room = stack.enter_context(small_disk(folder / "disk", DISK)) if disk else None
        if space:
            stack.enter_context(network_of(space[0].space))
        run = ChaosRun(folder, NUM_LOCAL if space else NUM_WORKERS, room, space)
        with run:
            try:
                _go_through(run, outcome, until_s)
            except HangError as e:
                outcome.hang = str(e)
            except CrashError as e:
                outcome.crash = str(e)
        if not outcome.hang and not outcome.crash:
            _judge(run, outcome)


def _go_through(run: ChaosRun, outcome: Outcome, until_s: float) -> None:
    injector = Injector(run)
    run.settle(1)
    for fault in outcome.faults:
        if time.monotonic() > until_s:
            break
        outcome.happened.append((time.monotonic(), fault))
        with run.log.open("a") as log:
            log.write(f"{time.strftime('%H:%M:%S')} chaos: {fault}\n")
        if hit := injector.inject(fault):
            outcome.hits[hit] += 1
    run.train(5)
    if code := run.finish():
        raise CrashError(f"`evenstep run` ended with {code}")


def _judge(run: ChaosRun, outcome: Outcome) -> None:
    """Compare a run that trained to the end with a single process."""
    if crashes := [found for found in _crashes(run) if INJECTED not in found]:
        outcome.crash = f"{len(crashes)} errors, first {crashes[0]}"
    results = run.results()
    steps = {result["step"] for result in results.values()}
    if len(steps) != 1:
        outcome.differs = f"workers ended at different steps: {sorted(steps)}"
        return
    (outcome.num_steps,) = steps
    alone = run.out.with_name("alone")
    alone.mkdir()
    args = ["--out", str(alone), *epoch_args(outcome.num_steps)]
    ledger = alone / "ledger"
    process = fork_server().run([SCRIPT, *args], {"LEDGER": str(ledger)}, alone / "log")
    if process.wait(BOUND_S) != 0:
        raise RuntimeError(f"the script alone failed: {(alone / 'log').read_text()[-2000:]}")
    expected = torch.load(alone / "alone.pt", weights_only=True)
    for worker, result in results.items():
        try:
            same(result, expected)
        except AssertionError as e:
            outcome.differs = f"{worker}: {e}"
    trained = read_ledger(run.ledger, outcome.num_steps)
    outcome.lost, outcome.repeated = lost_and_repeated(
        trained, read_ledger(ledger, outcome.num_steps)
    )
    _find_idle(outcome, trained.commits_s)


def _crashes(run: ChaosRun) -> Iterator[str]:
    """Tracebacks and signals in all logs: a coordinator that was killed has not shown them all."""
    for log in (run.log, *sorted(run.folder.glob("logs/*.log"))):
        for match in CRASH.finditer(log.read_text(errors="replace")):
            yield f"{log.name}: {match[1] or match[2]}"


def _find_idle(outcome: Outcome, commits_s: Sequence[float]) -> None:
    for before_s, after_s in pairwise(commits_s):
        if after_s - before_s > outcome.idle_s:
            outcome.idle_s = after_s - before_s
            earlier = [fault for at_s, fault in outcome.happened if at_s < before_s]
            within = [fault for at_s, fault in outcome.happened if before_s <= at_s < after_s]
            outcome.idle_after = ", ".join(fault.title for fault in (*earlier[-1:], *within))


@contextmanager
def network_of(space: str) -> Iterator[None]:
    """In a network namespace, to reach what listens there."""
    libc = ctypes.CDLL(None)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{space}", os.O_RDONLY)
    try:
        assert libc.setns(there, 0) == 0, "cannot enter the network namespace"
        yield
    finally:
        assert libc.setns(home, 0) == 0
        os.close(there)
        os.close(home)
