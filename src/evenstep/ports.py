"""Every plug-in protocol on one screen, and how a plug-in is looked up by name.

A third party ships a class and registers it under the plug-in's entry-point group; forecasters and
sinks and preemption notices have a contract test to subclass in `evenstep.testing`. Policies and
heuristics are frozen values: their fields are their settings, and their state is passed in and
returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from evenstep.errors import ConfigError, nearest
from evenstep.types import Fleet, FloatArray, IntArray, Launch, Outcome, WorkerId

Memory = Any
"""A policy's state between steps: opaque to its caller, never modified in place."""

Move = tuple[IntArray, str]
"""Shares in the fleet's order, and why."""


class BatchPolicy(Protocol):
    """Decides on the next shares, and why, given a step's reports and forecasts."""

    def first_shares(self, memory: Memory | None, fleet: Fleet, batch: int) -> tuple[Memory, Move]:
        """First shares of a fleet. `memory` is the state of the previous fleet, None at first."""

    def next(
        self, memory: Memory, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[Memory, Move | None]:
        """Shares of the next step, or None to keep `shares`. They must keep the sum and bounds."""


@runtime_checkable
class Foresees(Protocol):
    """A batch policy that uses forecasts; for other policies none are made."""

    def pace(self, memory: Memory, fleet: Fleet, outcome: Outcome) -> FloatArray:
        """The speed to forecast, in samples per second. NaN: not measured."""


@runtime_checkable
class FitsCurves(Protocol):
    """A batch policy that fits step-time curves: what other shares would give is taken from it."""

    def curves(self, memory: Memory) -> ScalableCurves:
        """The curve of each worker, in the fleet's order."""


class Curves(Protocol):
    """One step-time curve per worker, and its inverse: `seconds(max_shares(t)) <= t`."""

    def seconds(self, shares: IntArray) -> FloatArray:
        """The time each worker takes for its share."""

    def max_shares(self, deadline_s: float) -> IntArray:
        """The largest share each worker finishes by the deadline."""


class ScalableCurves(Curves, Protocol):
    """Curves whose shape can be kept while workers become slower or faster."""

    def scaled(self, factor: FloatArray) -> Curves:
        """The curves of workers that take `factor` times as long."""


class Forecaster(Protocol):
    """Learns the speed of all workers of a roster, one step at a time."""

    def set_roster(self, workers: Sequence[WorkerId]) -> None:
        """Adopt a roster: keep the state of workers that stay, drop that of workers that left."""

    def learn(self, speed: FloatArray, outlook: FloatArray) -> None:
        """A step's samples per second (NaN: not measured) and its (free CPU, free memory)."""

    def forecast(self, outlook: FloatArray) -> FloatArray:
        """Samples per second of the next step, given its `outlook`. NaN: no forecast."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ScalingHeuristic(Protocol):
    """Decides whether a larger cluster is worth it, compared with a smaller one."""

    def worth(self, smaller: SizeRecord, larger: SizeRecord, job: JobView) -> tuple[bool, str]:
        """Pass or fail, and the figures behind it."""


class SizeRecord(Protocol):
    """Measurements of one cluster size."""

    @property
    def num_workers(self) -> int: ...
    @property
    def samples_per_s(self) -> float: ...
    @property
    def price_per_s(self) -> float: ...
    @property
    def batch(self) -> int: ...


class JobView(Protocol):
    """Progress of the job."""

    @property
    def elapsed_s(self) -> float: ...
    @property
    def samples_left(self) -> int: ...
    @property
    def initial_samples_per_s(self) -> float: ...
    @property
    def initial_total_s(self) -> float: ...


class Launcher(Protocol):
    """Starts and stops workers. A started worker joins by itself."""

    def launch(self, order: Launch) -> None: ...
    def stop(self, worker: WorkerId) -> None: ...


class PreemptionNotice(Protocol):
    """Knows of a cloud or a cluster that takes this machine away."""

    def poll(self) -> str:
        """Why and when the machine goes; empty if it stays. May take seconds, and may raise."""


class Sink(Protocol):
    """Takes a run's figures to another tool. Built in or registered by name, it is constructed with
    what follows the name in `--sink NAME:TARGET`; one that cannot be constructed ends the start.

    Called in a thread of its own, every few seconds: it may be slow, hang or raise.
    """

    def write(self, unix_s: float, step: int, figures: Mapping[str, float]) -> None:
        """Figures of a moment and the last step taken. Steps may repeat, and go back on resume."""

    def close(self) -> None:
        """The run is over, or this process leaves it."""


def look_up(group: str, name: str, built_in: Mapping[str, type[Any]]) -> type[Any]:
    """The class named `name`: built in, or from the entry points `evenstep.<group>`."""
    if name in built_in:
        return built_in[name]
    found = {e.name: e for e in entry_points(group=f"evenstep.{group}")}
    if name in found:
        loaded: type[Any] = found[name].load()
        return loaded
    known = sorted({*built_in, *found})
    near = nearest(name, known)
    hint = f"did you mean {near}?" if near else f"known: {', '.join(known)}"
    raise ConfigError("", f"unknown name {name!r}; {hint}")
