"""Time and memory to open a long journal: from the file to its first picture, and to all of them.

python -m bench.history                       100,000 steps of 16 workers
python -m bench.history --steps 600000        about a gigabyte
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from msgspec import UNSET

from evenstep.config import BatchSettings, Settings
from evenstep.journal import Journal, Record
from evenstep.types import Estimate, Joined, Plan, Regroup, StepDone, StepReport, Worker


def write(path: Path, num_steps: int, num_workers: int) -> None:
    """A journal in which every step is a record, with forecasts, and every 50th has a plan."""
    rng = np.random.default_rng(0)
    ids = [f"w{i}" for i in range(num_workers)]
    shares, batch = dict.fromkeys(ids, 32), 32 * num_workers
    regroup = Regroup(generation=1, roster=tuple(ids), reason="joined")
    plan = Plan(generation=1, from_step=0, shares=shares, reason="w3 is slowest")
    at_s = 0.0
    with Journal.create(path, Settings(batch=BatchSettings(size=batch))) as journal:
        journal.append(at_s, Joined(workers=tuple(map(_worker, ids))), (regroup, plan))
        for step in range(num_steps):
            compute_s = rng.lognormal(-3, 0.1, num_workers)
            slowest_s = float(compute_s.max())
            waits = (slowest_s - compute_s).tolist()
            at_s += slowest_s
            rate = batch / slowest_s
            done = StepDone(
                step=step,
                generation=1,
                seconds=slowest_s,
                reports=tuple(map(StepReport, ids, [32] * num_workers, compute_s.tolist(), waits)),
                forecasts=tuple((32 / compute_s).tolist()),
            )
            known = Estimate(rate, 0.8 * rate, 1.05 * rate, 0.1, 0.3) if step % 20 == 0 else UNSET
            paces = tuple(float(f"{32 / s:.5g}") for s in compute_s)
            actions = (plan,) if step % 50 == 0 else ()
            record = Record(at_s=at_s, event=done, actions=actions, estimate=known, paces=paces)
            journal.write(record)


def _worker(name: str) -> Worker:
    return Worker(id=name)


def open_it(path: Path) -> None:
    """Print how long it takes here, in a process of its own."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    from evenstep.observe.history import History
    from evenstep.observe.pictures import PICTURES, whole

    history = History.read(path)
    PICTURES[0].draw(history, whole(history))
    first_s, first_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    drawn = [picture.draw(history, whole(history)) for picture in PICTURES]
    all_s, all_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"first picture  {first_s:6.2f} s, {first_cpu_s:.2f} s of CPU time")
    print(f"all {sum(map(bool, drawn))} pictures {all_s:6.2f} s, {all_cpu_s:.2f} s of CPU time")
    print(f"memory         {peak:6.0f} MB at most")


def main() -> None:
    """Write a journal, and open it in another process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--open", type=Path, help="a journal that is there")
    args = parser.parse_args()
    if args.open:
        open_it(args.open)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        write(path, args.steps, args.workers)
        size = path.stat().st_size / 1e6
        print(f"{args.steps:,} steps of {args.workers} workers, {size:,.0f} MB", flush=True)
        subprocess.run([sys.executable, "-m", "bench.history", "--open", str(path)], check=True)


if __name__ == "__main__":
    main()
