"""The config tree: every setting of the brain, its default and its valid range."""

from __future__ import annotations

from math import inf
from typing import Any

import msgspec

from evenstep.errors import ConfigError
from evenstep.types import MOST_SAMPLES


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plug-in by name, with its options: `auto`, or `{name: shift, window: 20}`."""

    name: str
    options: dict[str, Any] = {}

    @classmethod
    def from_plain(cls, data: Any) -> Choice:
        """Read the short form (a name) or the long form (a mapping with a name)."""
        if isinstance(data, str) and data:
            return cls(data)
        if isinstance(data, dict) and isinstance(data.get("name"), str):
            if data.keys() == {"name", "options"} and isinstance(data["options"], dict):
                return cls(data["name"], dict(data["options"]))  # as the journal writes it
            return cls(data["name"], {k: v for k, v in data.items() if k != "name"})
        raise ConfigError("", f"expected a name, or a mapping with one, got {data!r}")


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The global batch: fixed at `size`, or `per_worker` for each worker up to `limit`."""

    size: int = 0
    per_worker: int = 0
    limit: int = 0
    min_share: int = 0  # 0: a worker that would only slow the step down may get nothing
    lr_rule: str = "linear"  # how the learning rate follows the batch
    lr_warmup_steps: int = 0  # steps of the ramp to a new learning rate

    def __post_init__(self) -> None:
        for name in ("size", "per_worker", "limit"):
            if getattr(self, name) < 0:
                raise ConfigError(name, f"must not be negative, got {getattr(self, name)}")
        if (self.size > 0) == (self.per_worker > 0):
            raise ConfigError(
                "",
                "set either size (a fixed global batch) or per_worker with limit, 1 or more: "
                f"got size {self.size} and per_worker {self.per_worker}",
            )
        if self.per_worker > 0 and self.limit < self.per_worker:
            raise ConfigError(
                "limit", f"must be at least per_worker, {self.per_worker}: got {self.limit}"
            )
        for name in ("size", "per_worker", "limit"):
            if getattr(self, name) > MOST_SAMPLES:
                raise ConfigError(name, f"must be at most {MOST_SAMPLES}: {getattr(self, name)}")
        if self.lr_warmup_steps < 0:
            raise ConfigError("lr_warmup_steps", f"must not be negative: {self.lr_warmup_steps}")
        upper = self.size or self.per_worker
        if not 0 <= self.min_share <= upper:
            raise ConfigError("min_share", f"must lie in [0, {upper}], got {self.min_share}")


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many workers the run may have. Below `min` it pauses."""

    min: int = 1
    max: int = 1_000_000

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise ConfigError("", f"need 1 <= min <= max, got {self.min} and {self.max}")


class ScalingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The search for the cluster size. Off unless a heuristic is set."""

    heuristic: Choice | None = None
    period_steps: int = 10  # steps between two looks
    step_workers: int = 4  # workers added or removed at once
    min_workers: int = 1  # lower bound of the search; workers.min is what pauses a run
    passes: int = 3  # lowest pairs that must pass before smaller sizes are no longer tried
    settle_steps: int = 100  # steps of data the next larger size needs before the search settles
    look_again: float = 0.2  # permanent relative shift in throughput that restarts the search

    def __post_init__(self) -> None:
        for name in ("period_steps", "step_workers", "min_workers", "passes", "settle_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be 1 or more: {getattr(self, name)}")
        if not 0 < self.look_again < inf:
            raise ConfigError("look_again", f"must be above 0, got {self.look_again}")


class StragglerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Straggler replacement: off by default, as in the paper."""

    replace: bool = False
    threshold: float = 0.8  # fraction of the usual throughput of its kind
    alpha: float = 0.1  # EWMA gain of that fraction
    warmup_steps: int = 20  # steps below the threshold before a replacement: rebalancing is first
    cooldown_steps: int = 200  # without replacements after one that was no faster

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise ConfigError("threshold", f"must lie in (0, 1): {self.threshold}")
        if not 0 < self.alpha <= 1:
            raise ConfigError("alpha", f"must lie in (0, 1]: {self.alpha}")
        for name in ("warmup_steps", "cooldown_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(name, f"must not be negative, got {getattr(self, name)}")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of the brain."""

    batch: BatchSettings
    policy: Choice = Choice("auto")
    forecaster: Choice = Choice("narx")
    workers: WorkerSettings = WorkerSettings()
    scaling: ScalingSettings = ScalingSettings()
    straggler: StragglerSettings = StragglerSettings()
    samples: int = 0  # length of the job, for heuristics that look ahead; 0: unknown
    plan_delay_steps: int = 0  # steps that workers have prefetched beyond the reported one

    def __post_init__(self) -> None:
        for name in ("samples", "plan_delay_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(name, f"must not be negative, got {getattr(self, name)}")
        if self.scaling.min_workers > self.workers.max:
            raise ConfigError(
                "scaling.min_workers",
                f"must be at most workers.max, {self.workers.max}: got {self.scaling.min_workers}",
            )
