"""Faults at random moments of real runs, each compared with one process that trained alone.

    python -m bench.chaos --faults 1000          # an hour or more; the last line says it all
    python -m bench.chaos --faults 30 --seed 7 --no-namespaces
    python -m bench.chaos --replay RUNFOLDER/faults.jsonl

Every run takes some faults, trains to the end, and must have the parameters of one process, each
sample once. If one has not, its folder is kept, with the list of its faults.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest import SkipTest

import numpy as np

from bench.chaos import faults as fl
from bench.chaos.driver import play
from bench.chaos.report import Outcome, load_faults, phases, save_faults, summary
from bench.testbed.disk import small_disk
from bench.testbed.hosts import make_hosts
from evenstep.emulate.interference import Interference

PER_RUN = 25  # faults
HOSTS_EVERY = 4  # one run in so many has several hosts


def main(argv: Sequence[str] | None = None) -> int:
    """Inject the faults. Returns 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=240.0, help="no new fault after that")
    parser.add_argument("--hogs", type=int, default=0, help="busy processes beside the runs")
    parser.add_argument("--no-namespaces", action="store_true", help="one host, no full disk")
    parser.add_argument("--runs", type=int, nargs="*", help="only these of the seed's runs")
    parser.add_argument("--replay", type=Path, help="a faults.jsonl instead of random faults")
    parser.add_argument("--kinds", nargs="*", help="only these kinds of faults")
    parser.add_argument(
        "--folder", type=Path, help="keep all runs here, not only those that went wrong"
    )
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # contexts clean up
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    until_s = time.monotonic() + 60 * args.minutes
    disk, hosts = _available(folder) if not args.no_namespaces else (False, False)
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        if args.hogs:
            cores = sorted(os.sched_getaffinity(0))
            hogs = Interference([cores[i % len(cores)] for i in range(args.hogs)])
            stack.callback(hogs.close)
        stack.callback(_conclude, outcomes, args.seed)  # whatever happens
        for i, faults in _plans(args, disk=disk, hosts=hosts):
            if time.monotonic() > until_s:
                break
            with_hosts = any(fault.kind in fl.HOSTS for fault in faults)
            place = folder / f"run-{i}"
            outcome = play(faults, place, disk=disk, hosts=with_hosts, until_s=until_s)
            outcomes.append(outcome)
            _tell(i, outcome, args.seed)
            if not outcome.problem and not args.folder:
                shutil.rmtree(place)
    if any(outcome.problem for outcome in outcomes):
        return 1
    if not args.folder:
        shutil.rmtree(folder)
    return 0


def _plans(
    args: argparse.Namespace, *, disk: bool, hosts: bool
) -> Iterator[tuple[int, list[fl.Fault]]]:
    """The faults of each run, by its number."""
    if args.replay:
        yield 0, load_faults(args.replay)
        return
    num_runs = -(-args.faults // PER_RUN)
    for i in range(num_runs):
        rng = np.random.default_rng([args.seed, i])  # one run can be repeated by itself
        several = hosts and i % HOSTS_EVERY == HOSTS_EVERY - 1
        kinds = {*fl.ANYWHERE, *(fl.HOSTS if several else fl.ONE_HOST)}
        kinds |= fl.SMALL_DISK.keys() if disk else set()
        kinds = kinds & {*args.kinds} if args.kinds else kinds
        num = min(PER_RUN, args.faults - i * PER_RUN)
        faults = fl.draw_faults(rng, num, kinds, long_stops=not args.no_namespaces)
        if not args.runs or i in args.runs:
            yield i, faults


def _tell(i: int, outcome: Outcome, seed: int) -> None:
    kinds = len({fault.kind for fault in outcome.faults})
    print(
        f"run {i}: {outcome.num_faults} faults of {kinds} kinds, {outcome.num_steps} steps, "
        f"idle {outcome.idle_s:.1f} s after {outcome.idle_after or 'nothing'}: "
        f"{outcome.problem or 'the same as one process'}",
        flush=True,
    )
    path = outcome.folder / "faults.jsonl"
    save_faults(path, [fault for _, fault in outcome.happened])
    if not outcome.problem:
        return
    print(f"  again: python -m bench.chaos --seed {seed} --runs {i}, or --replay {path}")
    print(path.read_text(), end="", flush=True)


def _conclude(outcomes: Sequence[Outcome], seed: int) -> None:
    if outcomes:
        print(phases(outcomes))
        print(f"{summary(outcomes)}; seed {seed}", flush=True)


def _available(folder: Path) -> tuple[bool, bool]:
    """Whether disks and hosts can be emulated here."""
    found = []
    for context in (small_disk(folder / "probe"), make_hosts(1)):
        try:
            with context:
                found.append(True)
        except SkipTest as e:
            print(f"left out: {e}")
            found.append(False)
    return found[0], found[1]


if __name__ == "__main__":
    sys.exit(main())
