"""The YAML format of a scenario: workers, what happens to them, and the settings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from evenstep.config import Choice, Settings
from evenstep.errors import ConfigError
from evenstep.strict import build, load_yaml, override
from evenstep.types import Worker


def _not_negative(struct: msgspec.Struct, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(struct, name) < float("inf"):
            raise ConfigError(name, f"must be 0 or more, got {getattr(struct, name)}")


def _above_0(struct: msgspec.Struct, name: str) -> None:
    if not 0 < getattr(struct, name) < float("inf"):
        raise ConfigError(name, f"must be above 0, got {getattr(struct, name)}")


class Slowdown(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's steps take `factor` times as long from `at_s` on, once or periodically."""

    at_s: float = 0.0
    until_s: float | None = None  # none: until the end
    every_s: float | None = None  # repeats with this period
    factor: float
    ramp_s: float = 0.0  # time to reach `factor`: heat is slow, a quota is not
    announced: bool = False  # visible as less free CPU when the step begins

    def __post_init__(self) -> None:
        _above_0(self, "factor")
        _not_negative(self, "at_s", "ramp_s")
        if self.until_s is not None and not self.at_s < self.until_s < float("inf"):
            raise ConfigError("until_s", f"must be after at_s ({self.at_s}), got {self.until_s}")
        if self.every_s is not None:
            if self.until_s is None:
                raise ConfigError("until_s", "is missing: a slowdown with every_s needs an end")
            if self.every_s < self.until_s - self.at_s:
                raise ConfigError(
                    "every_s", f"must be at least until_s - at_s ({self.until_s - self.at_s})"
                )


class WorkerGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identical workers: their step-time curve, their kind, and what happens to them.

    A share of b samples takes `max(floor_s, fixed_s + per_sample_s * b)`, or `b / throughput(b)`
    if a throughput table is given.
    """

    kind: str = "cpu"
    count: int = 1
    fixed_s: float = 0.0
    per_sample_s: float = 0.0
    floor_s: float = 0.0  # step time of an unsaturated GPU, whatever its share
    throughput: dict[int, float] = {}  # share -> samples per second, instead of the three above
    cores: float = 1.0
    flops: float | None = None
    cap: int | None = None
    price: float = 1.0  # per hour
    jitter: float = 0.0  # relative standard deviation of a step's time
    free_cpu_noise: float = 0.0  # relative standard deviation of the reported free CPU
    changes: tuple[Slowdown, ...] = ()
    joins_at_s: float | None = None  # none: from the start
    leaves_at_s: float | None = None  # announced, like a spot notice
    fails_at_s: float | None = None  # not announced
    stagger_s: float = 0.0  # delay of all these times per further worker of the group
    startup_s: float = 0.0  # from launch to join, if the brain launches it
    warmup_share: int = 0  # samples on which it measures its speed before joining; 0: none

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError("count", f"must be 1 or more, got {self.count}")
        times = ("fixed_s", "per_sample_s", "floor_s", "startup_s", "stagger_s")
        _not_negative(self, *times, "jitter", "free_cpu_noise", "price", "warmup_share")
        Worker(id=self.kind, cores=self.cores, flops=self.flops, cap=self.cap)  # checks its fields
        joins_s = self.joins_at_s or 0.0
        if not 0 <= joins_s < float("inf"):
            raise ConfigError("joins_at_s", f"must be 0 or more, got {joins_s}")
        for name in ("leaves_at_s", "fails_at_s"):
            at_s = getattr(self, name)
            if at_s is not None and not joins_s < at_s < float("inf"):
                raise ConfigError(name, f"must be after the join at {joins_s} s, got {at_s}")
        if bool(self.throughput) == (self.fixed_s + self.per_sample_s + self.floor_s > 0):
            raise ConfigError(
                "", "give a step time (fixed_s, per_sample_s, floor_s) or a throughput table"
            )
        table = sorted(self.throughput.items())
        for share, per_s in table:
            if share < 1 or not 0 < per_s < float("inf"):
                raise ConfigError("throughput", f"must be above 0, got {share}: {per_s}")
        for (less, slow), (more, fast) in pairwise(table):
            if less / slow > more / fast:
                raise ConfigError("throughput", f"{more} samples take less time than {less}")


class Communication(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost of a ring all-reduce per step: latency per hop, and bandwidth."""

    latency_s: float = 0.0
    model_bytes: float = 0.0
    bytes_per_s: float = 1e9

    def __post_init__(self) -> None:
        _not_negative(self, "latency_s", "model_bytes")
        _above_0(self, "bytes_per_s")

    def seconds(self, num_workers: int) -> float:
        """Exposed time of one all-reduce."""
        if num_workers < 2:
            return 0.0
        hops = 2 * (num_workers - 1)
        return self.latency_s * hops + hops / num_workers * self.model_bytes / self.bytes_per_s


class SizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator asks for a number of workers."""

    at_s: float
    num_workers: int

    def __post_init__(self) -> None:
        _not_negative(self, "at_s")
        _above_0(self, "num_workers")


class Paper(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Published figures for this set-up, for comparison tables."""

    source: str
    unit: str = ""
    figures: dict[str, float] = {}  # by policy


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a simulated run needs. It lasts for `steps` steps or `samples` samples."""

    about: str = ""
    settings: Settings
    workers: tuple[WorkerGroup, ...]
    pool: tuple[WorkerGroup, ...] = ()  # workers that the launcher can add
    communication: Communication = Communication()
    regroup_s: float = 0.0  # idle time of a regroup
    detect_s: float = 0.0  # from a failure to its detection
    steps: int = 0
    samples: int = 0
    seed: int = 0
    asks: tuple[SizeRequest, ...] = ()
    policies: tuple[Choice, ...] = ()  # to compare if the command line names none
    paper: Paper | None = None

    def __post_init__(self) -> None:
        if not self.workers:
            raise ConfigError("workers", "is empty; a run needs at least one")
        _not_negative(self, "regroup_s", "detect_s", "seed", "steps", "samples")
        if (self.steps > 0) == (self.samples > 0):
            raise ConfigError(
                "",
                "give the length of the run as either steps or samples, 1 or more: "
                f"got steps {self.steps} and samples {self.samples}",
            )


def load_scenario(path: Path | str, sets: Sequence[str] = ()) -> Scenario:
    """Load a scenario from a YAML file, overridden by `dotted.path=value`."""
    path = Path(path)
    return build(Scenario, override(load_yaml(path), sets), source=str(path))
