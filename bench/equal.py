"""evenstep against plain DDP on equal workers: step time, memory and overlap.

Both start side by side and train in turns, a few steps each, so that other load on the machine
affects both. Two workers, one per core.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean, median, quantiles

from bench.turns import Ranks

WORLD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Step times of evenstep relative to DDP, by turn, and the peak memory of any rank."""

    ratios: list[float]
    ddp_s: float
    ddp_peak_bytes: float
    peak_bytes: float

    @property
    def ratio(self) -> float:
        """Median step-time ratio over pairs of turns."""
        return median(self.ratios)

    @property
    def uncertainty(self) -> float:
        """Half the width of the median's 95 % interval, from the quartiles."""
        low, _, high = quantiles(self.ratios)
        return 1.57 * (high - low) / math.sqrt(len(self.ratios))


def compare_with_ddp(
    workload: str,
    batch: int,
    *,
    policy: str = "auto",
    turns: int,
    steps: int,
    warm: int,
    launches: int = 1,
) -> Compared:
    """Train a workload both ways in turns, over several launches."""
    parts = [_compare_once(workload, batch, policy, turns, steps, warm) for _ in range(launches)]
    return Compared(
        ratios=[ratio for part in parts for ratio in part.ratios],
        ddp_s=fmean(part.ddp_s for part in parts),
        ddp_peak_bytes=max(part.ddp_peak_bytes for part in parts),
        peak_bytes=max(part.peak_bytes for part in parts),
    )


def _compare_once(
    workload: str, batch: int, policy: str, turns: int, steps: int, warm: int
) -> Compared:
    with ExitStack() as cleanup:
        ddp = _TimedRanks("ddp", workload, batch, cleanup)
        even = _TimedRanks(policy, workload, batch, cleanup)
        for ranks in (ddp, even):
            ranks.train(warm)
        took_s: dict[_TimedRanks, list[float]] = {ddp: [], even: []}
        for turn in range(turns):
            for ranks in (ddp, even) if turn % 2 else (even, ddp):
                took_s[ranks].append(ranks.train(steps))
        return Compared(
            ratios=[ours / theirs for ours, theirs in zip(took_s[even], took_s[ddp], strict=True)],
            ddp_s=fmean(took_s[ddp]) / steps,
            ddp_peak_bytes=ddp.peak_bytes,
            peak_bytes=even.peak_bytes,
        )


class _TimedRanks(Ranks):
    """Two ranks that train one way."""

    def __init__(self, way: str, workload: str, batch: int, cleanup: ExitStack) -> None:
        shares = ",".join([str(batch // WORLD)] * WORLD)
        args = ["--workload", workload, "--way", way, "--batch", str(batch), "--shares", shares]
        super().__init__(args, WORLD, cleanup)
        self.peak_bytes = 0.0

    def train(self, steps: int) -> float:
        """Train for some steps. Returns the seconds of the slowest rank."""
        answers = self.ask(steps)
        self.peak_bytes = max(rank["peak_bytes"] for rank in answers)
        return float(max(rank["seconds"] for rank in answers))
