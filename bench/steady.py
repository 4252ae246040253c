"""The cost of elasticity while nothing changes: `evenstep run` against the same under torchrun.

    python -m bench.steady    # about nine minutes

Both run side by side and train in turns, so that other load on the machine affects both. Several
launches, because process placement differs from launch to launch.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

from bench.tables import write
from bench.turn_job import WORLD, TurnJob

LAUNCHES, TURNS, STEPS, WARM = 6, 320, 10, 20


def launch(*, elastic_first: bool) -> list[tuple[float, float]]:
    """Seconds of every turn of `evenstep run`, and of the same under torchrun."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
        starters = {
            "elastic": ["evenstep", "run", "--workers", str(WORLD), "--run", f"{folder}/run"],
            "compared": ["torchrun", "--standalone", "--nproc-per-node", str(WORLD)],
        }
        order = starters if elastic_first else reversed(starters)
        jobs = {
            name: TurnJob(
                Path(folder, name), starters[name], cleanup, turns=TURNS + WARM, steps=STEPS
            )
            for name in order
        }
        elastic, compared = jobs["elastic"], jobs["compared"]
        for _ in range(WARM):
            elastic.take()
            compared.take()
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
    parser.add_argument("--launches", type=int, default=LAUNCHES)
    args = parser.parse_args()
    pairs = []
    for i in range(args.launches):
        pairs += (own := launch(elastic_first=i % 2 == 0))
        print(f"{median(ours / theirs for ours, theirs in own):.3f}", flush=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    low, _, high = quantiles(ratios)
    uncertainty = 1.57 * (high - low) / math.sqrt(len(ratios))
    step_ms = 1000 * median(theirs for _, theirs in pairs) / STEPS
    result = (
        f"{WORLD} workers, {step_ms:.1f} ms a step under torchrun; `evenstep run` over that: "
        f"{median(ratios):.4f} ± {uncertainty:.4f} "
        f"(median over {len(ratios)} pairs of turns of {STEPS} steps, {args.launches} launches)."
    )
    print(result)
    write("bench.md", "steady", result, made_by="python -m bench.steady")


if __name__ == "__main__":
    main()
