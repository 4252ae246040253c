"""The cost of elasticity while nothing changes: `evenstep run` against the same under torchrun.

    python -m bench.steady     # about nine minutes

Both run side by side and train in turns, so that other load on the machine affects both. Several
launches, because process placement differs from launch to launch.
"""

from __future__ import annotations

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


def launch(*, elastic_first: bool) -> list[tuple[float, float]]:
    """Seconds of every turn, of `evenstep run` and of the same under torchrun."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
        run = ["run", "--workers", str(WORLD), "--run", f"{folder}/run"]
        torchrun = ["torchrun", "--standalone", "--nproc-per-node", str(WORLD)]
        starters = {"elastic": ["evenstep", *run], "fixed": torchrun}
        order = starters if elastic_first else reversed(starters)
        jobs = {name: TurnJob(Path(folder, name), starters[name], cleanup) for name in order}
        elastic, fixed = jobs["elastic"], jobs["fixed"]
        for _ in range(WARM):
            elastic.take()
            fixed.take()
        pairs = []
        for turn in range(TURNS):
            if turn % 2:
                pairs.append((elastic.take(), fixed.take()))
            else:
                pairs.append((fixed.take(), elastic.take())[::-1])
        return pairs


def main() -> None:
    """Measure, and write the result to docs/bench.md."""
    pairs = []
    for i in range(LAUNCHES):
        pairs += (own := launch(elastic_first=i % 2 == 0))
        print(f"{median(ours / theirs for ours, theirs in own):.3f}", flush=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    low, _, high = quantiles(ratios)
    uncertainty = 1.57 * (high - low) / math.sqrt(len(ratios))
    step_ms = 1000 * median(theirs for _, theirs in pairs) / STEPS
    result = (
        f"{WORLD} workers, {step_ms:.1f} ms a step under torchrun; `evenstep run` over that: "
        f"{median(ratios):.3f} ± {uncertainty:.3f} "
        f"(median over {len(ratios)} pairs of turns of {STEPS} steps, {LAUNCHES} launches)."
    )
    print(result)
    write("bench.md", "steady", result, made_by="python -m bench.steady")


if __name__ == "__main__":
    main()
