"""Which generation a worker is in, which it has to go to, and when waiting is of no use."""

from __future__ import annotations

import logging

from evenstep.launch.environment import CoordinatorAddress
from evenstep.messages import Alive, Generation, Stuck
from evenstep.train.comm.group import SupersededError
from evenstep.train.roster.control import Control

log = logging.getLogger("evenstep")

UNKNOWN_S = 60.0  # a wait this long is worth a word while nobody knows how long steps take
PATIENCE_S, PATIENCE_STEPS = 5.0, 10.0  # afterwards: so long, or so many steps
LEFT, EVICTED = 0, 75  # exit codes: as asked, and "try again later"


class LeftError(SystemExit):
    """This worker's part is over before the end of training: its process ends."""


class LeaseOverError(LeftError):
    """The coordinator was away for so long that others may hold this worker's place."""


class Membership:
    """A worker's name, its line to the coordinator, and its generation."""

    def __init__(self, where: CoordinatorAddress) -> None:
        self.generation = 0
        self.begun = False  # it has been part of the training
        self._rests = False  # as a spare
        self.step = 0
        self.usual_s = 0.0  # how long a step takes
        self.waiting = False  # on peers, or for a generation
        self.apart = False  # the step's sums are through, and no batch has been asked for since
        self._complained = 0
        self.control = Control(where, self._progress)

    def _progress(self) -> Alive:
        return Alive(
            generation=self.generation, step=self.step, waiting=self.waiting, apart=self.apart
        )

    @property
    def worker(self) -> str:
        """This worker's name, for life."""
        return self.control.welcome.worker

    @property
    def roster(self) -> tuple[str, ...]:
        """The workers of this generation, by rank."""
        return self.control.generations[self.generation].roster if self.generation else ()

    @property
    def newest(self) -> int:
        """The newest generation that makes this one void."""
        return self.control.newest_at_once if self.begun else self.control.newest

    def superseded(self) -> str:
        """Why whatever is done in this generation is void, if it is."""
        newest = self.newest
        return f"generation {newest} replaces {self.generation}" if newest > self.generation else ""

    def next(self, planned: int = 0) -> Generation:
        """Wait for the generation to go to: the newest that holds at once, or the planned one."""
        self.waiting, warned = True, False
        while True:
            number = self.newest
            if number <= self.generation and planned in self.control.generations:
                number = planned
            if number > self.generation:
                self.waiting = False
                return self.control.generations[number]
            self.check_place()
            if self.control.paused and not warned:
                warned = True
                log.warning("paused: %s", self.control.paused)
            self.control.wait(0.05)

    def enter(self, told: Generation) -> tuple[int, int]:
        """Go there: rank and world."""
        self.generation, self._rests = told.number, False
        self.control.forget_before(told.number)
        return told.roster.index(self.worker), len(told.roster)

    def rest(self, told: Generation) -> None:
        """Out of the roster, and ready to come back as one who is new."""
        self.generation, self.begun, self._rests = told.number, False, True
        self.control.forget_before(told.number)

    def check(self, waited_s: float) -> None:
        """Called while waiting for peers: raises if that is of no use any more."""
        if why := self.superseded():
            raise SupersededError(why)
        self.check_place()
        self.waiting = True
        known_s = max(PATIENCE_S, PATIENCE_STEPS * self.usual_s)
        if waited_s > (known_s if self.usual_s else UNKNOWN_S):
            self.complain(waited_s)

    def complain(self, waited_s: float) -> None:
        """Tell the coordinator, once a generation, that peers are not heard of."""
        if self._complained < self.generation:
            self._complained = self.generation
            self.control.tell(Stuck(generation=self.generation, step=self.step, waited_s=waited_s))

    def check_place(self) -> None:
        """Raises if this worker's place is not its own any more."""
        if self.control.goodbye is not None and self._rests:
            log.info("%s, a spare, leaves the run: %s", self.worker, self.control.goodbye)
            raise LeftError(LEFT)
        if self.control.goodbye is not None:
            log.error("this worker is no part of the run any more: %s", self.control.goodbye)
            raise LeftError(EVICTED)
        if self.control.lease_over:
            log.error("no word from the coordinator for %g s", self.control.welcome.lease_s)
            raise LeaseOverError(EVICTED)
