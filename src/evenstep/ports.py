"""Every plug-in protocol on one screen, and how a plug-in is looked up by name.

A third party ships a class and registers it under the plug-in's entry-point group; forecasters,
sinks, preemption notices and launchers have a contract test to subclass in `evenstep.testing`.
Policies and heuristics are frozen values: their fields are their settings, and their state is
passed in and returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from evenstep.errors import ConfigError, EvenstepError, nearest
from evenstep.types import Fleet, FloatArray, IntArray, Outcome, WorkerId

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


class Stage(Enum):
    """How far an engine is with a worker that it was asked for."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What an engine shows of a worker."""

    stage: Stage
    why: str = ""  # what it waits for, or why it ended, in the engine's words
    exit_code: int | None = None  # negative: a signal. None: the engine ended it, or lost its host
    leaves: str = ""  # why the engine is about to take its host away; empty if it is not


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKind:
    """Workers that get the same of an engine, and are expected to be equally fast."""

    name: str
    cpus: int = 0  # 0: as many as the engine gives by itself
    gpus: int = 0
    gpu_type: str = ""
    memory_bytes: int = 0
    price: float | None = None  # of a worker-hour
    flops: float | None = None  # for the first shares of kinds with different devices
    options: Mapping[str, str] = field(default_factory=dict)  # the engine's own

    def variables(self) -> dict[str, str]:
        """What a worker of this kind is told about itself."""
        cores = {"EVENSTEP_CORES": str(self.cpus)} if self.cpus else {}
        return {**({"EVENSTEP_KIND": self.name} if self.name else {}), **cores}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """What a launcher is constructed with. Workers run `python -m evenstep.launch.worker *command`.

    A worker needs the variables of `env` and its kind, EVENSTEP_WORKER with its name, and the
    token: the file that `env` names, where the run's folder is shared, or EVENSTEP_TOKEN.
    """

    run: str  # a name of the run, the same when it is resumed
    folder: Path  # of the run; output goes to logs/WORKER.log in it, if the worker's host has it
    command: tuple[str, ...]  # the script and its arguments
    env: Mapping[str, str]  # holds no secret
    token: str = field(repr=False)  # never on a command line: others can read those
    kinds: Mapping[str, WorkerKind]
    options: Mapping[str, str]  # of the command line, for this engine


class LaunchRefusedError(EvenstepError, RuntimeError):
    """The engine refuses a request for workers, and would refuse it again."""


class Launcher(Protocol):
    """Starts and stops workers on an engine, such as Slurm or Ray. Started workers join by
    themselves, and outlive this process. Made with an `EngineJob`; ConfigError: it cannot be used.

    Each method may take long, hang or raise: `launch.remote` calls it in a thread of its own, never
    in the coordinator's. Calls of different methods overlap, those of one method do not.
    """

    def start(self, kind: str, workers: Sequence[WorkerId]) -> None:
        """Ask for workers of a kind, under these names. An empty kind: the launcher's choice.

        LaunchRefusedError: asking again cannot help. After any other error it is asked again.
        """

    def stop(self, workers: Sequence[WorkerId]) -> None:
        """Ask that workers end, by SIGTERM and later SIGKILL. Withdraw those that are pending.

        Workers that have ended or never existed are no error.
        """

    def observe(self) -> Mapping[WorkerId, Observed]:
        """All of the run's workers that the engine shows, also those of an earlier coordinator.

        It may forget workers some time after their end. A worker that it does not show has ended,
        with an exit code that is not known.
        """

    def close(self) -> None:
        """Disconnect from the engine; workers run on."""


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
