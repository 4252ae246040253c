"""The demo: three uneven workers train with equal shares, then with auto; then one is killed and
another joins.

Run `make demo` or `python -m bench.demo`. Takes two minutes.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from statistics import fmean

import numpy as np

from bench.clusters import Cluster, Limit, Run, train
from bench.loss import killed_and_joined
from bench.quotas import Curves
from bench.workloads import ORIGIN
from evenstep.emulate import h_level, steady
from evenstep.emulate.cgroup import NoQuotaError

STEPS = 40
SETTLED = 10  # steps until auto has found its shares


def main() -> None:
    """Train both ways and print the comparison."""
    cores = h_level(3, 6, 1.5, max_cores=1.0)
    cluster = Cluster(name="demo", workload="cnn", batch=768, cores=steady(cores))
    each = ", ".join(f"{c:.2f}" for c in cores)
    say(f"Three workers with {each} cores train a CNN on Fashion-MNIST ({ORIGIN}),")
    say(f"a global batch of {cluster.batch}, {STEPS} steps.\n")
    say("measuring each worker alone, for the limit ...")
    best = limit_of(cluster)
    say("training with equal shares ...")
    before = train(cluster, "uniform", STEPS)
    say("training with auto ...\n")
    after = train(cluster, "auto", STEPS)

    equal_s, auto_s = settled_s(before), settled_s(after)
    say(f"equal shares  {shares(before):>14}   {equal_s:.3f} s per step")
    say(f"auto          {shares(after):>14}   {auto_s:.3f} s per step")
    reached = "unknown"
    if best is not None:
        best_s = best.compute_s + best.exposed_s
        say(f"the limit     {' '.join(map(str, best.shares)):>14}   {best_s:.3f} s per step")
        reached = f"{best_s / auto_s:.0%}"
    say(f"\nspeed-up: {equal_s / auto_s:.1f} times; share of the limit reached: {reached}")
    apart = float(np.abs(before.losses - after.losses).max())
    if apart > 1e-3:
        raise SystemExit(f"the two runs differ: losses are up to {apart:.2g} apart")
    say(f"both trained on the same samples: the losses of all {STEPS} steps agree to {apart:.1g}\n")

    say("now with `evenstep run`: one worker is killed during training, another joins ...")
    outcome = killed_and_joined(["--epochs", "4", "--limit", "12288", "--batch", "256"], kill_at=30)
    say(f"alone        {outcome.alone}")
    say(f"evenstep run {outcome.elastic}")
    joined = "the replacement came too late to join"
    if outcome.joined_s is not None:
        joined = f"{outcome.joined_s:.2f} s for the join"
    say(f"idle: {outcome.lost_s:.2f} s for the loss, {joined}")
    apart = abs(outcome.alone_loss - outcome.elastic_loss)
    if apart > 0.02 * outcome.alone_loss:
        raise SystemExit("the two runs differ")
    say(f"the same run: its loss agrees to {apart:.1g}, in single precision over 192 steps")


def limit_of(cluster: Cluster) -> Limit | None:
    """The limit of these workers; None without the rights to set quotas."""
    try:
        with ExitStack() as cleanup:
            return Curves(cluster, cleanup).measure()
    except NoQuotaError as e:
        say(f"cannot measure the limit: {e}")
        return None


def settled_s(run: Run) -> float:
    """Seconds per step once the shares have settled."""
    return fmean(run.seconds[SETTLED:])


def shares(run: Run) -> str:
    """The last shares, by rank."""
    return " ".join(map(str, run.shares[-1]))


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
