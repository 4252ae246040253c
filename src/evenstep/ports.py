"""Every plug on one screen: what can be replaced by name, and how a name is looked up.

A third party ships a class and names it under the entry-point group of its plug; forecasters have a
contract to subclass in `evenstep.testing`. A plug that decides (policy, heuristic) is a frozen
value: its fields are its settings, and what it remembers is handed to it and handed back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from evenstep.errors import ConfigError, nearest
from evenstep.types import Fleet, FloatArray, IntArray, Launch, Outcome, WorkerId

Memory = Any
"""What a policy remembers between steps: opaque to everyone else, never changed in place."""

Move = tuple[IntArray, str]
"""Shares in the fleet's order, and why."""


class BatchPolicy(Protocol):
    """Given this step's reports and forecasts: which shares next, and why."""

    def seat(self, memory: Memory | None, fleet: Fleet, batch: int) -> tuple[Memory, Move]:
        """First shares of a fleet. `memory` is that of the fleet before, whoever was in it."""
        ...

    def next(
        self, memory: Memory, fleet: Fleet, batch: int, shares: IntArray, outcome: Outcome
    ) -> tuple[Memory, Move | None]:
        """Shares of the next step, or None to keep `shares`. Sum and bounds always hold."""
        ...


@runtime_checkable
class Foresees(Protocol):
    """A batch policy that looks ahead. Only for these does anyone spend time on forecasts."""

    def pace(self, memory: Memory, fleet: Fleet, outcome: Outcome) -> FloatArray:
        """The speed whose course is to be forecast, in samples per second. NaN: not measured."""
        ...


class Forecaster(Protocol):
    """Learns each worker's speed, one step at a time, all workers of a roster at once."""

    def seat(self, workers: Sequence[WorkerId]) -> None:
        """Follow the roster: keep what is known of those who stay, forget those who left."""
        ...

    def learn(self, speed: FloatArray, outlook: FloatArray) -> None:
        """The step's samples per second (NaN: none measured) and its (free CPU, free memory)."""
        ...

    def forecast(self, outlook: FloatArray) -> FloatArray:
        """Samples per second of the coming step, whose `outlook` is known. NaN: cannot tell."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ScalingHeuristic(Protocol):
    """Whether a larger size of the cluster is worth it over a smaller one."""

    def worth(self, smaller: SizeRecord, larger: SizeRecord, job: JobView) -> tuple[bool, str]:
        """Pass or fail, and the figures it rests on."""
        ...


class SizeRecord(Protocol):
    """What is known of one size of the cluster."""

    @property
    def num_workers(self) -> int: ...
    @property
    def samples_per_s(self) -> float: ...
    @property
    def price_per_s(self) -> float: ...
    @property
    def batch(self) -> int: ...


class JobView(Protocol):
    """How far the job is."""

    @property
    def elapsed_s(self) -> float: ...
    @property
    def samples_left(self) -> int: ...
    @property
    def initial_samples_per_s(self) -> float: ...
    @property
    def initial_total_s(self) -> float: ...


class Launcher(Protocol):
    """Starts and stops workers. A started one reports by joining."""

    def launch(self, order: Launch) -> None: ...
    def stop(self, worker: WorkerId) -> None: ...


class Sink(Protocol):
    """Receives each journal record as it is written."""

    def write(self, record: Any) -> None: ...


def look_up(group: str, name: str, built_in: Mapping[str, type[Any]]) -> type[Any]:
    """The class called `name`: built in, or from the entry points `evenstep.<group>`."""
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
