"""A scenario: the workers, what happens to them, and what the brain is told."""

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


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From a time on, a worker's steps take `factor` times as long: once, or again and again."""

    at_s: float = 0.0
    until_s: float | None = None  # none: for good
    every_s: float | None = None  # from `at_s` to `until_s`, and again each `every_s`
    factor: float
    ramp_s: float = 0.0  # how long it takes to reach `factor`: heat is slow, a quota is not
    announced: bool = False  # free CPU tells of it as the step begins

    def __post_init__(self) -> None:
        _above_0(self, "factor")
        _not_negative(self, "at_s", "ramp_s")
        if self.until_s is not None and not self.at_s < self.until_s < float("inf"):
            raise ConfigError("until_s", f"must lie after at_s, {self.at_s}: got {self.until_s}")
        if self.every_s is not None:
            if self.until_s is None:
                raise ConfigError("until_s", "is missing: what comes again must end first")
            if self.every_s < self.until_s - self.at_s:
                raise ConfigError(
                    "every_s", f"must be at least until_s - at_s, {self.until_s - self.at_s}"
                )


class WorkerGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that are alike: a step-time curve, a label, and a fate.

    A share of b samples takes `max(floor_s, fixed_s + per_sample_s * b)`, or `b / throughput(b)`
    where a table is given.
    """

    kind: str = "cpu"
    count: int = 1
    fixed_s: float = 0.0
    per_sample_s: float = 0.0
    floor_s: float = 0.0  # a GPU below saturation takes this long whatever its share
    throughput: dict[int, float] = {}  # share -> samples per second, instead of the three above
    cores: float = 1.0
    flops: float | None = None
    cap: int | None = None
    price: float = 1.0  # per hour
    jitter: float = 0.0  # relative standard deviation of a step's time
    free_cpu_noise: float = 0.0  # relative standard deviation of what is announced
    changes: tuple[Change, ...] = ()
    joins_at_s: float | None = None  # none: there from the start
    leaves_at_s: float | None = None  # announced, as by a spot notice
    fails_at_s: float | None = None  # not announced
    stagger_s: float = 0.0  # each further worker of the group meets all that so much later
    startup_s: float = 0.0  # from the order to the join, where the brain launches it
    warmup_share: int = 0  # it measures its speed on so many samples before it joins; 0: no

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError("count", f"must be 1 or more, got {self.count}")
        times = ("fixed_s", "per_sample_s", "floor_s", "startup_s", "stagger_s")
        _not_negative(self, *times, "jitter", "free_cpu_noise", "price", "warmup_share")
        Worker(id=self.kind, cores=self.cores, flops=self.flops, cap=self.cap)  # what it refuses
        joins_s = self.joins_at_s or 0.0
        if not 0 <= joins_s < float("inf"):
            raise ConfigError("joins_at_s", f"must be 0 or more, got {joins_s}")
        for name in ("leaves_at_s", "fails_at_s"):
            at_s = getattr(self, name)
            if at_s is not None and not joins_s < at_s < float("inf"):
                raise ConfigError(name, f"must lie after its join at {joins_s} s, got {at_s}")
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
    """What a ring all-reduce adds to a step: latency by hop, bandwidth by model size."""

    latency_s: float = 0.0
    model_bytes: float = 0.0
    bytes_per_s: float = 1e9

    def __post_init__(self) -> None:
        _not_negative(self, "latency_s", "model_bytes")
        _above_0(self, "bytes_per_s")

    def seconds(self, num_workers: int) -> float:
        """The exposed time of one reduction."""
        if num_workers < 2:
            return 0.0
        hops = 2 * (num_workers - 1)
        return self.latency_s * hops + hops / num_workers * self.model_bytes / self.bytes_per_s


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator asks for a size."""

    at_s: float
    num_workers: int

    def __post_init__(self) -> None:
        _not_negative(self, "at_s")
        _above_0(self, "num_workers")


class Paper(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was published for this set-up, for tables that put both side by side."""

    source: str
    unit: str = ""
    figures: dict[str, float] = {}  # by policy


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a virtual run needs. It lasts for `steps`, or until `samples` are trained."""

    about: str = ""
    settings: Settings
    workers: tuple[WorkerGroup, ...]
    pool: tuple[WorkerGroup, ...] = ()  # what the launcher can add
    communication: Communication = Communication()
    regroup_s: float = 0.0  # idle time of a transition
    detect_s: float = 0.0  # from a failure to its notice
    steps: int = 0
    samples: int = 0
    seed: int = 0
    asks: tuple[Ask, ...] = ()
    policies: tuple[Choice, ...] = ()  # to be compared, where the command line names none
    paper: Paper | None = None

    def __post_init__(self) -> None:
        if not self.workers:
            raise ConfigError("workers", "is empty; a run needs one at least")
        _not_negative(self, "regroup_s", "detect_s", "seed", "steps", "samples")
        if (self.steps > 0) == (self.samples > 0):
            raise ConfigError(
                "",
                "give either steps or samples, 1 or more, as the length of the run: "
                f"got steps {self.steps} and samples {self.samples}",
            )


def load(path: Path | str, sets: Sequence[str] = ()) -> Scenario:
    """The scenario in a YAML file, with `dotted.path=value` put over it."""
    path = Path(path)
    return build(Scenario, override(load_yaml(path), sets), source=str(path))
