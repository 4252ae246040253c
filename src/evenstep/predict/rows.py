"""One row of state per worker, kept through every change of the roster.

Columns have the worker as their last axis: an operation on a column is one loop over all workers,
and no worker's numbers depend on who else is there.
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
class Table:
    """The mutable half of a forecaster; its settings are the frozen half."""

    workers: tuple[WorkerId, ...] = ()
    columns: Columns = field(default_factory=dict)
    looked: tuple[bytes, Any] | None = None  # an outlook, and what was made of it since learning


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows(ABC):
    """The part of a forecaster that follows the roster and can be saved."""

    _table: Table = field(init=False, repr=False, default_factory=Table)

    @abstractmethod
    def _fresh(self, workers: Sequence[WorkerId]) -> Columns:
        """The columns of workers of whom nothing is known."""

    @property
    def _columns(self) -> Columns:
        return self._table.columns

    def seat(self, workers: Sequence[WorkerId]) -> None:
        """Follow the roster: keep what is known of those who stay, forget those who left."""
        roster = tuple(workers)
        if roster == self._table.workers and self._columns:
            return
        if len(set(roster)) < len(roster):
            raise InvalidInputError("roster", "names a worker twice; worker ids must differ")
        known = {w: i for i, w in enumerate(self._table.workers)}
        new = [i for i, w in enumerate(roster) if w not in known]
        stay = [i for i, w in enumerate(roster) if w in known]
        source = [known[roster[i]] for i in stay]
        columns = self._fresh([roster[i] for i in new])
        for name, fresh in columns.items():
            column = np.empty((*fresh.shape[:-1], len(roster)))
            column[..., new] = fresh
            if stay:
                column[..., stay] = self._columns[name][..., source]
            columns[name] = column
        self._begin(roster, columns)

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that was learned, as plain arrays."""
        columns = {name: column.copy() for name, column in self._columns.items()}
        return {"workers": list(self._table.workers), **columns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what a forecaster with the same settings has learned."""
        workers = tuple(state["workers"])
        columns = self._fresh(workers)
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
        self._begin(workers, columns)

    def _begin(self, workers: tuple[WorkerId, ...], columns: Columns) -> None:
        table = self._table
        table.workers, table.columns, table.looked = workers, columns, None

    def _outlook(self, outlook: FloatArray) -> FloatArray:
        """`outlook` as one line per resource, or an error that names the shape it should have."""
        needed = (len(self._table.workers), 2)
        if np.shape(outlook) != needed:
            raise InvalidInputError(
                "outlook",
                f"has shape {np.shape(outlook)}, the roster needs {needed}; seat it first",
            )
        return np.asarray(outlook, dtype=np.float64).T

    def _speed(self, speed: FloatArray) -> FloatArray:
        """`speed` with NaN wherever it is no speed at all."""
        needed = (len(self._table.workers),)
        if np.shape(speed) != needed:
            raise InvalidInputError(
                "speed", f"has shape {np.shape(speed)}, the roster needs {needed}; seat it first"
            )
        given = np.asarray(speed, dtype=np.float64)
        return np.where((given > 0) & (given < np.inf), given, np.nan)


def full(value: float, workers: Sequence[WorkerId]) -> FloatArray:
    """A column with the same number for every worker."""
    return np.full(len(workers), value, dtype=np.float64)
