"""What the leader tells the coordinator of its steps: at once if something is new, else in a sum.

A message for every step costs two milliseconds where both share cores: a fifth of a short step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from evenstep.messages import Generation, Stepped
from evenstep.pace import MeanTimes, Pacer, SkippedSteps
from evenstep.train.reduce.pulse import Report
from evenstep.types import Steps

TELLING_S = 0.002  # what a message costs sender and receiver together, as measured


class Reporter:
    """Tells of steps, within a bounded part of the time. Every step is counted once."""

    def __init__(
        self, tell: Callable[[Stepped], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell, self._clock = tell, clock
        self._pace, self._means, self._tally = Pacer(), MeanTimes(), SkippedSteps()

    def look_closely(self) -> None:
        """The roster or the shares have changed: tell of the next few steps in any case."""
        self._pace.decided(0.0, moved=True)

    def step(
        self,
        by: Generation,
        step: int,
        seconds: float,
        reports: Sequence[Report],
        grad_squared_norm: float,
        position: int,
    ) -> None:
        """A step was taken by a generation; its reports are in the order of the roster.

        `position`: samples of the job that the run has walked through with it.
        """
        compute_s, samples = [r.compute_s for r in reports], [r.samples for r in reports]
        wanted = self._pace.should_decide(self._clock(), compute_s)
        self._means.add(samples, compute_s, restart=self._pace.eventful)
        if not wanted:
            self._tally.add(by.number, Steps(num=1, seconds=seconds, samples=sum(samples)))
            return
        rows = tuple(map(Report.of, reports, by.roster, *zip(*self._means.take(), strict=True)))
        self._tell(
            Stepped(
                generation=by.number,
                step=step,
                seconds=seconds,
                reports=rows,
                grad_squared_norm=grad_squared_norm,
                quiet=self._tally.take(by.number),
                position=position,
            )
        )
        self._pace.decided(TELLING_S, moved=False)
