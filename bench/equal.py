"""On equal workers: the step, the memory and the overlap of evenstep beside plain DDP.

Both are started side by side and train in turns, a few steps each, so that whatever else the
machine does meets both. Two workers: one a core.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean, median, quantiles

from bench.turns import Crew

WORLD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """evenstep over DDP, turn by turn; steps in seconds; the highest memory of any rank."""

    ratios: list[float]
    ddp_s: float
    ddp_peak_bytes: float
    peak_bytes: float

    @property
    def ratio(self) -> float:
        """Of the steps: the median over pairs of turns."""
        return median(self.ratios)

    @property
    def uncertainty(self) -> float:
        """Half the width of a 95 % interval for the median, from the quartiles."""
        low, _, high = quantiles(self.ratios)
        return 1.57 * (high - low) / math.sqrt(len(self.ratios))


def compare(
    workload: str,
    batch: int,
    *,
    policy: str = "auto",
    turns: int,
    steps: int,
    warm: int,
    launches: int = 1,
) -> Compared:
    """Train a workload both ways in turns; where processes land differs from launch to launch."""
    parts = [_compare(workload, batch, policy, turns, steps, warm) for _ in range(launches)]
    return Compared(
        ratios=[ratio for part in parts for ratio in part.ratios],
        ddp_s=fmean(part.ddp_s for part in parts),
        ddp_peak_bytes=max(part.ddp_peak_bytes for part in parts),
        peak_bytes=max(part.peak_bytes for part in parts),
    )


def _compare(workload: str, batch: int, policy: str, turns: int, steps: int, warm: int) -> Compared:
    with ExitStack() as last:
        ddp = _Crew("ddp", workload, batch, last)
        even = _Crew(policy, workload, batch, last)
        for crew in (ddp, even):
            crew.take(warm)
        took_s: dict[_Crew, list[float]] = {ddp: [], even: []}
        for turn in range(turns):
            for crew in (ddp, even) if turn % 2 else (even, ddp):
                took_s[crew].append(crew.take(steps))
        return Compared(
            ratios=[ours / theirs for ours, theirs in zip(took_s[even], took_s[ddp], strict=True)],
            ddp_s=fmean(took_s[ddp]) / steps,
            ddp_peak_bytes=ddp.peak_bytes,
            peak_bytes=even.peak_bytes,
        )


class _Crew(Crew):
    """Two ranks of a way to train."""

    def __init__(self, way: str, workload: str, batch: int, last: ExitStack) -> None:
        shares = ",".join([str(batch // WORLD)] * WORLD)
        args = ["--workload", workload, "--way", way, "--batch", str(batch), "--shares", shares]
        super().__init__(args, WORLD, last)
        self.peak_bytes = 0.0

    def take(self, steps: int) -> float:
        """Train for so many steps; how long the slowest rank took."""
        told = self.tell(steps)
        self.peak_bytes = max(rank["peak_bytes"] for rank in told)
        return float(max(rank["seconds"] for rank in told))
