"""The cost of elasticity while nothing changes: `evenstep run` against the same under torchrun.

    python -m bench.steady              # about nine minutes
    python -m bench.steady --observed   # the cost of being looked at, against nobody looking

Both run side by side and train in turns, so that other load on the machine affects both. Several
launches, because process placement differs from launch to launch.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

from bench.jobs import BIN, BOUND_S, ENVIRONMENT, ROOT, end_process
from bench.tables import write
from bench.turns import KEEP_MEMORY
from bench.viewers import watch

LAUNCHES, TURNS, STEPS, WARM, BATCH, WORLD = 6, 320, 10, 20, 256, 2


class TurnJob:
    """A job that trains one turn on request."""

    def __init__(self, folder: Path, starter: Sequence[str], cleanup: ExitStack) -> None:
        self._folder, self._turn = folder, 0
        folder.mkdir()
        script = str(ROOT / "bench" / "rivals" / "in_turns.py")
        args = ["--out", str(folder), "--batch", str(BATCH), "--turns", str(TURNS + WARM)]
        log = cleanup.enter_context((folder / "log").open("w"))
        process = subprocess.Popen(
            [str(BIN / starter[0]), *starter[1:], script, *args, "--steps", str(STEPS)],
            env={**os.environ, **ENVIRONMENT, **KEEP_MEMORY},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        cleanup.callback(end_process, process)

    def take(self) -> float:
        """Train one turn. Returns the seconds of the slowest worker."""
        (self._folder / f"go-{self._turn}").touch()
        results = [self._folder / f"done-{self._turn}-{rank}" for rank in range(WORLD)]
        self._turn += 1
        deadline_s = time.monotonic() + BOUND_S
        while not all(path.exists() for path in results):
            if time.monotonic() > deadline_s:
                raise SystemExit((self._folder / "log").read_text()[-3000:])
            time.sleep(0.005)
        return max(float(path.read_text()) for path in results)


def launch(*, elastic_first: bool, observed: bool) -> list[tuple[float, float]]:
    """Seconds of every turn of `evenstep run`, and of what it is compared with.

    That is the same under torchrun, or if `observed`, the same with nobody looking.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
        run = ["evenstep", "run", "--workers", str(WORLD), "--run", f"{folder}/run"]
        if observed:
            run += ["--page", "--sink", f"prometheus:{folder}/figures.prom"]
            other = ["evenstep", "run", "--workers", str(WORLD), "--run", f"{folder}/other"]
        else:
            other = ["torchrun", "--standalone", "--nproc-per-node", str(WORLD)]
        starters = {"elastic": run, "compared": other}
        order = starters if elastic_first else reversed(starters)
        jobs = {name: TurnJob(Path(folder, name), starters[name], cleanup) for name in order}
        elastic, compared = jobs["elastic"], jobs["compared"]
        for turn in range(WARM):
            elastic.take()
            compared.take()
            if observed and not turn:
                watch(Path(folder, "run"), Path(folder, "elastic", "log"), cleanup)
        pairs = []
        for turn in range(TURNS):
            if turn % 2:
                pairs.append((elastic.take(), compared.take()))
            else:
                pairs.append((compared.take(), elastic.take())[::-1])
        return pairs


def main() -> None:
    """Measure, and write the result to docs/bench.md."""
    parser = argparse.ArgumentParser(prog="python -m bench.steady", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--observed", action="store_true", help="what looking at a run costs it")
    parser.add_argument("--launches", type=int, default=LAUNCHES)
    args = parser.parse_args()
    pairs = []
    for i in range(args.launches):
        pairs += (own := launch(elastic_first=i % 2 == 0, observed=args.observed))
        print(f"{median(ours / theirs for ours, theirs in own):.3f}", flush=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    low, _, high = quantiles(ratios)
    uncertainty = 1.57 * (high - low) / math.sqrt(len(ratios))
    step_ms = 1000 * median(theirs for _, theirs in pairs) / STEPS
    compared = "`evenstep run`" if args.observed else "torchrun"
    what = "with a page, `top` and Prometheus looking" if args.observed else "`evenstep run`"
    result = (
        f"{WORLD} workers, {step_ms:.1f} ms a step under {compared}; {what} over that: "
        f"{median(ratios):.4f} ± {uncertainty:.4f} "
        f"(median over {len(ratios)} pairs of turns of {STEPS} steps, {args.launches} launches)."
    )
    print(result)
    made_by = "python -m bench.steady" + (" --observed" if args.observed else "")
    write("bench.md", "observed" if args.observed else "steady", result, made_by=made_by)


if __name__ == "__main__":
    main()
