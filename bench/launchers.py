"""Step time on Ray and Slurm against workers that `evenstep run` starts itself.

    python -m bench.launchers [--rounds 3] [--steps 400]

The same job of two workers, the engines taking turns, on this machine. Steps are spent waiting for
the most part, so that the workers' own arithmetic does not hide what an engine adds; the quietest
round counts, and the spread of all rounds tells how quiet the machine was. Needs Slurm
(.ci/packages), Ray (pip install "evenstep[ray]"), or one of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.jobs import BIN
from bench.tables import markdown
from bench.testbed import ray_cluster, slurm
from bench.testbed.cli_run import ENVIRONMENT
from bench.testbed.live_run import EPOCH_STEPS, SCRIPT
from evenstep.journal import read
from evenstep.types import StepDone, Steps

WARM_STEPS = 100
PAUSE_S = 0.02  # in every step

Engine = tuple[Sequence[str], Mapping[str, str]]  # options of `evenstep run`, and variables


def engines(stack: ExitStack, folder: Path) -> dict[str, Engine]:
    """Those that this machine has."""
    found: dict[str, Engine] = {"local": ((), {})}
    if problem := slurm.missing():
        print(f"without Slurm: {problem}")
    else:
        cluster = stack.enter_context(slurm.slurm(folder / "slurm"))
        found["slurm"] = ("--on", "slurm", "--kind", "cpu=2"), cluster.variables
    if problem := ray_cluster.missing():
        print(f"without Ray: {problem}")
    else:
        nodes = stack.enter_context(ray_cluster.ray_cluster(ENVIRONMENT))
        nodes.add(num_cpus=4)
        found["ray"] = ("--on", "ray", "--address", nodes.address, "--kind", "cpu=2"), {}
    return found


def step_s(folder: Path, engine: Engine, num_steps: int) -> float:
    """Seconds of a step, on average, once the workers are warm."""
    options, variables = engine
    run, out = folder / "run", folder / "out"
    out.mkdir()
    job = [SCRIPT, "--out", out, "--pause", PAUSE_S, "--epochs", num_steps // EPOCH_STEPS]
    command = [BIN / "evenstep", "run", "--workers", 2, "--host", "127.0.0.1", "--run", run]
    done = subprocess.run(
        [str(part) for part in (*command, *options, *job)],
        env={**os.environ, **ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    _, records = read(run / "journal.jsonl")
    events = [record.event for record in records]
    steps = [e.steps for e in events if isinstance(e, StepDone) and e.step >= WARM_STEPS]
    total = sum(steps, Steps())
    return total.seconds / total.num


def main() -> None:
    """Print one row for each engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = engines(stack, folder)
        seconds: dict[str, list[float]] = {name: [] for name in found}
        for turn in range(args.rounds):
            for name, engine in found.items():
                place = folder / f"{name}-{turn}"
                place.mkdir()
                seconds[name].append(step_s(place, engine, args.steps))
    rows = []
    for name, each in seconds.items():
        ratios = [s / local for s, local in zip(each, seconds["local"], strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        best = f"{min(each) / min(seconds['local']):.3f}"
        rows.append([name, f"{1000 * min(each):.2f} ms", best, spread])
    print(markdown(["workers by", "a step, at best", "to local", "in all rounds"], rows))


if __name__ == "__main__":
    main()
