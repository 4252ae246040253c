"""The steps of one roster as columns, which can be made coarser to save memory."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from math import nan

import numpy as np
from numpy.typing import NDArray

from evenstep.types import FloatArray, WorkerId

Cells = NDArray[np.float32]

ROW = (
    "at_s",  # when the last step of the row was done
    "from_s",  # when its first one began
    "num_steps",
    "seconds",  # of all its steps together
    "samples",
    "shortest_s",  # of the steps that were reported one by one
    "longest_s",
    "step",  # the last one
    "position",
    "idle_s",
    "signal",  # of the gradient, an EWMA; NaN: not measured
    "noise",
    "generation",
)
AT, FROM, NUM, SECONDS, SAMPLES, SHORTEST, LONGEST, STEP, POSITION = range(9)
IDLE, SIGNAL, NOISE, GENERATION = range(9, 13)

CELL = ("share", "compute_s", "longest_compute_s", "wait_s", "forecast", "pace")
"""For each worker of a row. The last two are samples per second, NaN if there are none: what was
forecast for it, and what came."""
SHARE, COMPUTE, LONGEST_COMPUTE, WAIT, FORECAST, PACE = range(6)

PACK_ROW = struct.Struct(f"{len(ROW)}d").pack


class Stretch:
    """Consecutive steps of one generation; a row is a recorded step with the quiet ones before it,
    or several of them."""

    def __init__(self, generation: int, workers: tuple[WorkerId, ...]) -> None:
        self.generation, self.workers = generation, workers
        self._rows, self._cells = array("d"), array("f")
        self._pack_cells = struct.Struct(f"{len(CELL) * len(workers)}f").pack
        self.foreseen: Sequence[float] = (nan,) * len(workers)  # for the next row

    def __len__(self) -> int:
        return len(self._rows) // len(ROW)

    @property
    def num_cells(self) -> int:
        """Numbers of workers that are kept."""
        return len(self._cells)

    @property
    def last_s(self) -> float:
        """When its last step was done."""
        return self._rows[AT - len(ROW)]

    @property
    def first_s(self) -> float:
        """When its first recorded step was done."""
        return self._rows[AT]

    def around(self, at_s: float) -> tuple[Cells, Sequence[float]]:
        """The cells of the last row up to a time, and the forecasts made with it."""
        rows, cells = self.rows(-np.inf, np.inf)
        last = max(0, int(np.searchsorted(rows[:, AT], at_s, "right")) - 1)
        is_newest = last + 1 == len(rows)
        return cells[last], self.foreseen if is_newest else cells[last + 1, FORECAST].tolist()

    def append(
        self,
        row: Sequence[float],
        share: Sequence[float],
        compute_s: Sequence[float],
        wait_s: Sequence[float],
        forecast: Sequence[float],
        pace: Sequence[float],
    ) -> None:
        """One more row: a recorded step. ValueError if its numbers do not fit."""
        try:  # packed: filling arrays takes several times as long
            cells = self._pack_cells(*share, *compute_s, *compute_s, *wait_s, *forecast, *pace)
            packed = PACK_ROW(*row)
        except (struct.error, OverflowError) as e:
            raise ValueError(str(e)) from None
        self._cells.frombytes(cells)
        self._rows.frombytes(packed)

    def rows(self, begin_s: float, end_s: float) -> tuple[FloatArray, Cells]:
        """Rows and cells [row, name, worker] between two times; the last may end after that."""
        rows = np.frombuffer(self._rows).reshape(-1, len(ROW))
        first = int(np.searchsorted(rows[:, AT], begin_s))
        end = int(np.searchsorted(rows[:, AT], end_s, "right"))
        end += end < len(rows) and bool(rows[end, FROM] < end_s)
        cells = np.frombuffer(self._cells, dtype=np.float32)
        shaped = cells.reshape(-1, len(CELL), len(self.workers))
        return rows[first:end].copy(), shaped[first:end].copy()

    def halve(self) -> None:
        """Merge rows two by two."""
        rows, cells = self.rows(-np.inf, np.inf)
        starts = np.arange(0, len(rows), 2)
        rows, cells = merged(rows, cells, starts)
        self._rows, self._cells = array("d", rows.tobytes()), array("f", cells.tobytes())


def merged(rows: FloatArray, cells: Cells, starts: NDArray[np.int64]) -> tuple[FloatArray, Cells]:
    """Merge the rows from each start to the next: totals, extremes, and means over steps."""
    if not len(starts):
        return rows[:0], cells[:0]
    ends = np.append(starts[1:], len(rows)) - 1
    num = rows[:, NUM]
    out = rows[ends].copy()
    out[:, FROM] = rows[starts, FROM]
    for column in (NUM, SECONDS, SAMPLES, IDLE):
        out[:, column] = np.add.reduceat(rows[:, column], starts)
    out[:, SHORTEST] = np.minimum.reduceat(rows[:, SHORTEST], starts)
    out[:, LONGEST] = np.maximum.reduceat(rows[:, LONGEST], starts)
    for column in (SIGNAL, NOISE):
        out[:, column] = _mean(rows[:, column], num, starts)
    few = np.empty((len(starts), *cells.shape[1:]), dtype=np.float32)
    for name in (SHARE, COMPUTE, WAIT, FORECAST, PACE):
        few[:, name] = _mean(cells[:, name], num[:, None], starts)
    few[:, LONGEST_COMPUTE] = np.fmax.reduceat(cells[:, LONGEST_COMPUTE], starts)
    return out, few


def _mean(
    values: NDArray[np.floating], weight: FloatArray, starts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Weighted means of the finite values; NaN where there are none."""
    known = np.isfinite(values)
    if known.all():
        totals = np.add.reduceat(values * weight, starts, axis=0, dtype=np.float64)
        return np.asarray(totals / np.add.reduceat(weight, starts, axis=0))
    if not known.any():
        return np.full((len(starts), *values.shape[1:]), np.nan)
    weights = np.where(known, weight, 0.0)
    totals = np.add.reduceat(np.where(known, values, 0.0) * weights, starts, axis=0)
    weights = np.add.reduceat(weights, starts, axis=0)
    with np.errstate(invalid="ignore"):
        return np.asarray(totals / weights)
