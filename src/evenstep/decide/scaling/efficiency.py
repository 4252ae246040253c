"""Scaling efficiency: throughput gained per added worker, relative to the workers before."""

from __future__ import annotations

import msgspec

from evenstep.errors import ConfigError
from evenstep.ports import JobView, SizeRecord


class Efficiency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The larger size pays off while the efficiency of added workers exceeds `threshold`.

    1 is perfect scaling, 0 is no gain; below 0 the larger cluster is slower.
    """

    threshold: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ConfigError("threshold", f"must lie in [0, 1], got {self.threshold}")

    def worth(self, smaller: SizeRecord, larger: SizeRecord, job: JobView) -> tuple[bool, str]:
        s = efficiency(smaller, larger)
        passed = s > self.threshold
        return passed, f"efficiency {s:.2f} {'>' if passed else '<='} {self.threshold:.2f}"


def efficiency(smaller: SizeRecord, larger: SizeRecord) -> float:
    """((R' - R) / d) / (R / k), for R samples per second at k workers and R' at k + d."""
    added = larger.num_workers - smaller.num_workers
    gain_per_worker = (larger.samples_per_s - smaller.samples_per_s) / added
    return gain_per_worker / (smaller.samples_per_s / smaller.num_workers)
