"""Schedules: how many cores each worker has, and when that changes.

The unit of time is the caller's: seconds in `run_uneven`, steps in a loop that counts steps.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from evenstep.errors import InvalidInputError

log = logging.getLogger(__name__)

Levels = tuple[float, ...]
"""One number per worker: cores, a factor, or a duty."""

OMNILEARN_LEVELS = (1, 2, 4, 8, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`levels[i]` holds from `starts[i]` on; if `every` is finite, the schedule repeats."""

    starts: tuple[float, ...]
    levels: tuple[Levels, ...]
    every: float = math.inf

    def __post_init__(self) -> None:
        if not self.starts or len(self.starts) != len(self.levels):
            raise InvalidInputError(
                "schedule", f"{len(self.starts)} starts for {len(self.levels)} levels"
            )
        rises = all(a < b for a, b in zip(self.starts, [*self.starts[1:], self.every], strict=True))
        if self.starts[0] != 0 or not rises:
            raise InvalidInputError(
                "schedule", f"starts must rise from 0 to below {self.every}, got {self.starts}"
            )
        if len({len(row) for row in self.levels}) != 1 or not self.levels[0]:
            raise InvalidInputError("schedule", "each row of levels needs one number per worker")

    @property
    def num_workers(self) -> int:
        """Workers per row of levels."""
        return len(self.levels[0])

    def at(self, now: float) -> Levels:
        """The levels at a time; a change at exactly that time is included."""
        within = max(0.0, now) % self.every
        return self.levels[bisect_right(self.starts, within) - 1]

    def changes(self) -> Iterator[tuple[float, Levels]]:
        """Each stage with its start, in order; endless if the schedule repeats."""
        for origin in count(0.0, self.every) if self.every < math.inf else (0.0,):
            yield from (
                (origin + start, row) for start, row in zip(self.starts, self.levels, strict=True)
            )


class ScheduleRunner:
    """Calls `apply` with the schedule's levels: once on entry, then at each change, from a thread.

    Time is in seconds since entry. If `apply` raises in the thread, the thread ends and the error
    is raised again on exit.
    """

    def __init__(self, schedule: Schedule, apply: Callable[[Levels], None]) -> None:
        self._changes, self._apply = schedule.changes(), apply
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evenstep-schedule", daemon=True)
        self._error: Exception | None = None
        self._started_s = 0.0

    def __enter__(self) -> ScheduleRunner:
        self._started_s = time.monotonic()
        self._apply(next(self._changes)[1])
        self._thread.start()
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        for due_s, levels in self._changes:
            left_s = due_s - (time.monotonic() - self._started_s)
            if self._stop.wait(min(max(0.0, left_s), threading.TIMEOUT_MAX)):
                return
            try:
                self._apply(levels)
            except Exception as e:
                self._error = e
                log.exception("the emulation schedule stopped at %.1f s", due_s)
                return


def steady(levels: Sequence[float]) -> Schedule:
    """One stage, for ever."""
    return Schedule(starts=(0.0,), levels=(tuple(levels),))


def step_change(before: Sequence[float], after: Sequence[float], *, at: float) -> Schedule:
    """One change, at time `at`."""
    return Schedule(starts=(0.0, at), levels=(tuple(before), tuple(after)))


def periodic(
    calm: Sequence[float], disturbed: Sequence[float], *, every: float, lasts: float
) -> Schedule:
    """`calm`, then `disturbed` for the last `lasts` of each period `every`."""
    return Schedule(
        starts=(0.0, every - lasts), levels=(tuple(calm), tuple(disturbed)), every=every
    )


def h_level(
    num_workers: int, h: float, total_cores: float, *, max_cores: float = math.inf
) -> Levels:
    """Cores per worker, ascending, with a given total and a largest-to-smallest ratio of `h`.

    Neighbours differ by equal factors: 39 cores at H = 2 are 8.8, 12.5 and 17.7 (the paper: 9,
    12, 18). If the largest would exceed `max_cores` (one thread cannot use more than one core),
    it gets `max_cores`, the smallest 1/h of that, and the others share the rest evenly: 39 cores
    at H = 10 and `max_cores` 20 are 2, 17 and 20, as in the paper.
    """
    _check_workers(num_workers, h, total_cores)
    spread = [h ** (i / (num_workers - 1)) for i in range(num_workers)]
    scale = total_cores / math.fsum(spread)
    if spread[-1] * scale <= max_cores:
        return tuple(x * scale for x in spread)
    smallest = max_cores / h
    rest = total_cores - smallest - max_cores
    between = num_workers - 2
    if not smallest * between <= rest <= max_cores * between:
        raise InvalidInputError(
            "total_cores",
            f"{num_workers} workers with {smallest:.3g} to {max_cores:.3g} cores (H = {h:g}) "
            f"cannot use {total_cores:g} cores in total. Lower the total.",
        )
    return (smallest, *[rest / between] * between, max_cores)


def omnilearn(total_cores: float, *, stage: float, num_workers: int = 4) -> Schedule:
    """OmniLearn's dynamic heterogeneity, HL 1-2-4-8-8-4-2-1, each level for `stage`.

    At level h > 1 the last worker has h times the cores of the one before it, all others 1.5
    times: 48 cores over four are 12, 12, 12, 12 / 12, 12, 8, 16 / 9, 9, 6, 24 / 6, 6, 4, 32.
    """
    _check_workers(num_workers, 1, total_cores)

    def level(h: float) -> Levels:
        parts = [1.5] * (num_workers - 2) + [1.0, h] if h > 1 else [1.0] * num_workers
        return tuple(total_cores * part / math.fsum(parts) for part in parts)

    return Schedule(
        starts=tuple(i * stage for i in range(len(OMNILEARN_LEVELS))),
        levels=tuple(level(h) for h in OMNILEARN_LEVELS),
    )


def _check_workers(num_workers: int, h: float, total_cores: float) -> None:
    if num_workers < 2:
        raise InvalidInputError("num_workers", f"must be 2 or more, got {num_workers}")
    if not 1 <= h < math.inf:
        raise InvalidInputError("h", f"must be 1 or more and finite, got {h}")
    if not 0 < total_cores < math.inf:
        raise InvalidInputError("total_cores", f"must be above 0 and finite, got {total_cores}")
