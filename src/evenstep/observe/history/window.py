"""A part of a run, thinned to some points: means over steps, with the extremes beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from evenstep.observe.history import stretch as columns
from evenstep.observe.history.stretch import Cells, Stretch, merged
from evenstep.types import FloatArray, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunWindow:
    """Columns with one entry per point; tables [point, worker], NaN where there is nothing.

    A point stands for `num_steps` steps between `from_s` and `at_s`.
    """

    begin_s: float
    end_s: float
    workers: tuple[WorkerId, ...]  # with steps in it, in the order in which they came
    from_s: FloatArray
    at_s: FloatArray
    num_steps: FloatArray
    seconds: FloatArray  # in steps
    samples: FloatArray
    shortest_s: FloatArray  # of a step that was reported by itself
    longest_s: FloatArray
    step: FloatArray  # the last one
    position: FloatArray
    idle_s: FloatArray  # without training, because the roster changed
    noise_scale: FloatArray  # of the gradient, in samples
    generation: FloatArray
    share: Cells
    compute_s: Cells
    longest_compute_s: Cells
    wait_s: Cells
    forecast: Cells  # the speed that was forecast for these steps, in samples per second
    pace: Cells  # the speed that came

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def samples_per_s(self) -> FloatArray:
        """Throughput in steps."""
        return self.samples / self.seconds

    @property
    def step_s(self) -> FloatArray:
        """Mean seconds of a step."""
        return self.seconds / self.num_steps

    @property
    def batch(self) -> FloatArray:
        """Mean samples of a step."""
        return self.samples / self.num_steps


def thinned(
    stretches: Iterable[Stretch],
    order: dict[WorkerId, int],
    begin_s: float,
    end_s: float,
    points: int,
) -> RunWindow:
    """About `points` points from `begin_s` to `end_s`, one more for each change of the roster.

    `order` says in which order workers came.
    """
    width_s = max((end_s - begin_s) / points, 1e-9)
    found = []
    for part in stretches:
        rows, cells = part.rows(begin_s, end_s)
        if len(rows):
            starts = _starts(rows, begin_s, width_s, points)
            found.append((part.workers, *merged(rows, cells, starts)))
    present = {worker for workers, _, _ in found for worker in workers}
    workers = tuple(sorted(present, key=order.__getitem__))
    row_of = {worker: i for i, worker in enumerate(workers)}
    num = sum(len(rows) for _, rows, _ in found)
    all_rows = np.empty((num, len(columns.ROW)))
    all_cells = np.full((num, len(columns.CELL), len(workers)), np.nan, dtype=np.float32)
    first = 0
    for names, rows, cells in found:
        at = [row_of[worker] for worker in names]
        all_rows[first : first + len(rows)] = rows
        all_cells[first : first + len(rows), :, at] = cells
        first += len(rows)
    if num > 2 * points:  # the roster changes more often than points can show
        starts = _starts(all_rows, begin_s, width_s, points)
        all_rows, all_cells = merged(all_rows, all_cells, starts)
    return _window(begin_s, end_s, workers, all_rows, all_cells)


def _starts(
    rows: FloatArray, begin_s: float, width_s: float, points: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The first row of each point."""
    bucket = np.minimum((rows[:, columns.AT] - begin_s) // width_s, points)
    return np.flatnonzero(np.diff(bucket, prepend=-1.0))


def _window(
    begin_s: float, end_s: float, workers: tuple[WorkerId, ...], rows: FloatArray, cells: Cells
) -> RunWindow:
    signal, noise = rows[:, columns.SIGNAL], rows[:, columns.NOISE]
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where((signal > 0) & (noise > 0), noise / signal, np.nan)
    return RunWindow(
        begin_s=begin_s,
        end_s=end_s,
        workers=workers,
        from_s=rows[:, columns.FROM],
        at_s=rows[:, columns.AT],
        num_steps=rows[:, columns.NUM],
        seconds=rows[:, columns.SECONDS],
        samples=rows[:, columns.SAMPLES],
        shortest_s=rows[:, columns.SHORTEST],
        longest_s=rows[:, columns.LONGEST],
        step=rows[:, columns.STEP],
        position=rows[:, columns.POSITION],
        idle_s=rows[:, columns.IDLE],
        noise_scale=scale,
        generation=rows[:, columns.GENERATION],
        share=cells[:, columns.SHARE],
        compute_s=cells[:, columns.COMPUTE],
        longest_compute_s=cells[:, columns.LONGEST_COMPUTE],
        wait_s=cells[:, columns.WAIT],
        forecast=cells[:, columns.FORECAST],
        pace=cells[:, columns.PACE],
    )
