"""A custom scaling heuristic: the fewest workers with which a job meets its deadline."""

from __future__ import annotations

import msgspec

from evenstep.errors import ConfigError
from evenstep.ports import JobView, SizeRecord


class Deadline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The larger size is worth it if the smaller one would be late and the larger one is faster."""

    seconds: float  # for the whole job

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise ConfigError("seconds", f"must be above 0, got {self.seconds:g}")

    def worth(self, smaller: SizeRecord, larger: SizeRecord, job: JobView) -> tuple[bool, str]:
        """Whether the larger size is worth it, and why."""
        ends_s = job.elapsed_s + job.samples_left / smaller.samples_per_s
        reason = f"{smaller.num_workers} would end at {ends_s:.0f} s of {self.seconds:.0f} s"
        return ends_s > self.seconds and larger.samples_per_s > smaller.samples_per_s, reason
