"""Forecaster state per worker, carried over when the roster changes.

The last axis of every column is the worker: operations are vectorised over workers, and no worker's
numbers depend on the rest of the roster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evenstep.errors import InvalidInputError
from evenstep.types import FloatArray, WorkerId

Columns = dict[str, FloatArray]


@dataclass(slots=True)
class WorkerTable:
    """The mutable part of a forecaster; its settings are frozen."""

    workers: tuple[WorkerId, ...] = ()
    columns: Columns = field(default_factory=dict)
    cached: tuple[bytes, Any] | None = None  # an outlook and its prediction; cleared by learning


@dataclass(frozen=True, kw_only=True, eq=False)
class PerWorkerForecaster(ABC):
    """The part of a forecaster that tracks the roster and can be saved."""

    _table: WorkerTable = field(init=False, repr=False, default_factory=WorkerTable)

    @abstractmethod
    def _initial(self, workers: Sequence[WorkerId]) -> Columns:
        """Initial columns for new workers."""

    @property
    def _columns(self) -> Columns:
        return self._table.columns

    def set_roster(self, workers: Sequence[WorkerId]) -> None:
        roster = tuple(workers)
        if roster == self._table.workers and self._columns:
            return
        if len(set(roster)) < len(roster):
            raise InvalidInputError("roster", "names a worker twice; worker ids must be unique")
        known = {w: i for i, w in enumerate(self._table.workers)}
        new = [i for i, w in enumerate(roster) if w not in known]
        kept = [i for i, w in enumerate(roster) if w in known]
        source = [known[roster[i]] for i in kept]
        columns = self._initial([roster[i] for i in new])
        for name, fresh in columns.items():
            column = np.empty((*fresh.shape[:-1], len(roster)))
            column[..., new] = fresh
            if kept:
                column[..., kept] = self._columns[name][..., source]
            columns[name] = column
        self._reset(roster, columns)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the learned state, as plain arrays."""
        columns = {name: column.copy() for name, column in self._columns.items()}
        return {"workers": list(self._table.workers), **columns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a forecaster with the same settings."""
        workers = tuple(state["workers"])
        columns = self._initial(workers)
        for name, expected in columns.items():
            if name not in state and not workers:
                continue  # saved before the first roster
            shape = np.shape(state.get(name, ()))
            if shape != expected.shape:
                raise InvalidInputError(
                    f"forecaster state: {name}",
                    f"has shape {shape} where {expected.shape} is needed; "
                    "load it with the settings it was saved with",
                )
            columns[name] = np.array(state[name], dtype=np.float64)
        self._reset(workers, columns)

    def _reset(self, workers: tuple[WorkerId, ...], columns: Columns) -> None:
        table = self._table
        table.workers, table.columns, table.cached = workers, columns, None

    def _outlook(self, outlook: FloatArray) -> FloatArray:
        """`outlook` with one row per resource; raises unless its shape fits the roster."""
        needed = (len(self._table.workers), 2)
        if np.shape(outlook) != needed:
            raise InvalidInputError(
                "outlook",
                f"has shape {np.shape(outlook)}, the roster needs {needed}; call set_roster first",
            )
        return np.asarray(outlook, dtype=np.float64).T

    def _speed(self, speed: FloatArray) -> FloatArray:
        """`speed` with NaN for invalid values; raises unless its shape fits the roster."""
        needed = (len(self._table.workers),)
        if np.shape(speed) != needed:
            raise InvalidInputError(
                "speed",
                f"has shape {np.shape(speed)}, the roster needs {needed}; call set_roster first",
            )
        given = np.asarray(speed, dtype=np.float64)
        return np.where((given > 0) & (given < np.inf), given, np.nan)


def full(value: float, workers: Sequence[WorkerId]) -> FloatArray:
    """A column with the same value for every worker."""
    return np.full(len(workers), value, dtype=np.float64)
