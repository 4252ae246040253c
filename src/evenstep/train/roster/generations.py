"""Which generation this worker is in, and which one the coordinator has announced next."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from evenstep.coordinate.client import UnreachableError
from evenstep.launch.environment import CoordinatorAddress
from evenstep.messages import Alive, Began, Generation, Stuck, Welcome
from evenstep.train.comm.group import SupersededError
from evenstep.train.comm.host import ALONE, Host
from evenstep.train.roster.control import Control, NotWelcomeError
from evenstep.train.step import Step

log = logging.getLogger("evenstep")

UNKNOWN_S = 60.0  # a wait to report while the usual step time is unknown
MAX_UNSAVED = 300  # characters of the reason why a checkpoint is not written
NUM_STEPS = 10.0  # later: one of so many usual steps, or of the run's `silence_s` if that is longer
TRAINED, LEFT = 0, 75  # exit codes: nothing is left to do, and "the run may go on: join again"


class LeftError(SystemExit):
    """This worker leaves before the end of training: its process ends."""


class LeaseOverError(LeftError):
    """The lease ran out: other workers may have taken this one's place."""


class GenerationTracker:
    """This worker's id, generation and progress, and its connection to the coordinator."""

    def __init__(self, where: CoordinatorAddress, step: Step, host: Host = ALONE) -> None:
        self._step, self._host = step, host
        self.generation, self.rank, self.world = 0, 0, 1
        self.has_trained = False  # in this or an earlier generation, since it last was a spare
        self.lease_has_ended = False  # and this worker with it
        self.left: LeftError | None = None  # which ends the script
        self._is_spare = False
        self.waiting = False  # for other workers, or for a generation
        self.saving = False  # the last checkpoint
        self.unsaved: Callable[[], str] = str  # why the newest checkpoint is not written
        self.interrupt: Callable[[], None] | None = None  # the script, if it keeps this worker
        self._reported_stuck = 0
        self._formed = 0  # the newest generation that has formed, or that this worker rests in
        try:
            self.control = Control(where, self._progress, host)
        except (UnreachableError, NotWelcomeError) as e:
            if isinstance(e, NotWelcomeError) and e.trained:
                log.info("nothing is left to do: %s", e)
                raise LeftError(TRAINED) from None
            log.error("this worker has no part in the run: %s", e)
            raise LeftError(LEFT) from None

    def _progress(self) -> Alive:
        if self.interrupt is not None and self.left_out is not None:
            self.interrupt()  # again with each heartbeat, until it leaves
        return Alive(
            generation=self.generation,
            step=self._step.number,
            waiting=self.waiting,
            apart=self._step.is_between,
            saving=self.saving,
            forming=self.generation > self._formed,
            unsaved=_in_a_line(self.unsaved()),
        )

    @property
    def worker(self) -> str:
        """This worker's id, for life."""
        return self.welcome.worker

    @property
    def welcome(self) -> Welcome:
        """The terms on which the coordinator admitted this worker."""
        return self.control.welcome

    @property
    def current(self) -> Generation:
        """The generation that this worker is in."""
        return self.control.generations[self.generation]

    @property
    def roster(self) -> tuple[str, ...]:
        """The workers of this generation, by rank; empty while it is in none."""
        return self.current.roster if self.generation else ()

    @property
    def leads(self) -> bool:
        """Whether this worker is rank 0 of its generation."""
        return self.roster[:1] == (self.worker,)

    @property
    def newest(self) -> int:
        """The newest generation that voids this one; if this worker is in none, the newest."""
        return self.control.newest_unplanned if self.generation else self.control.newest

    @property
    def num_pending(self) -> int:
        """By how many generations the newest announced one is ahead."""
        return max(0, self.control.newest - self.generation)

    @property
    def left_out(self) -> Generation | None:
        """The newest generation that takes effect at once, if this worker is not in it."""
        newest = self.control.generations.get(self.control.newest_unplanned)
        if newest is None or newest.number <= self.generation or self.worker in newest.roster:
            return None
        return newest

    def must_move(self) -> bool:
        """Whether a generation that takes effect at once was announced; equal on the whole host.

        Raises if this worker is not part of the run any more.
        """
        self.check_membership()  # a worker that trains alone never waits, and would not notice
        return self._host.first_decides(self.newest) > self.generation

    def superseded(self) -> str:
        """Why all work of this generation is void; empty if it is not."""
        newest = self.newest
        return f"generation {newest} replaces {self.generation}" if newest > self.generation else ""

    def next(self, planned: int = 0) -> Generation:
        """Wait for the generation to move to: one that takes effect at once, or the planned one."""
        number = self._await_next(planned) if self._host.is_first else 0
        number = self._host.first_decides(number)
        while number not in self.control.generations:  # the first process heard of it first
            self.control.wait(0.05)
        return self.control.generations[number]

    def _await_next(self, planned: int) -> int:
        self.waiting, warned = True, False
        while True:
            number = self.newest
            if number <= self.generation and planned in self.control.generations:
                number = planned
            if number > self.generation:
                self.waiting = False
                return number
            self.check_membership()
            if self.control.paused and not warned:
                warned = True
                log.warning("paused: %s", self.control.paused)
            self.control.wait(0.05)

    def enter(self, generation: Generation) -> None:
        """Move to a generation."""
        self.generation, self._is_spare = generation.number, False
        self.rank, self.world = generation.roster.index(self.worker), len(generation.roster)
        self.control.forget_before(generation.number)

    def rest(self, generation: Generation) -> None:
        """Become a spare: out of the roster, ready to come back like a joiner."""
        self.generation, self.has_trained, self._is_spare = generation.number, False, True
        self._formed = generation.number
        self.control.forget_before(generation.number)

    def began_training(self) -> None:
        """The generation has formed, and this worker has its state."""
        self.has_trained, self.waiting, self._formed = True, False, self.generation
        if self.leads:
            self.control.send(Began(generation=self.generation, step=self._step.number))

    def stop_waiting(self) -> None:
        """This worker trains on."""
        self.waiting = False

    def check(self, waited_s: float) -> None:
        """Called while waiting for other workers; raises to end the wait."""
        if why := self.superseded():
            raise SupersededError(why)
        self.check_membership()
        self.waiting = True
        usual_s = self._step.usual_s
        silence_s = self.welcome.silence_s
        if waited_s > (max(silence_s, NUM_STEPS * usual_s) if usual_s else UNKNOWN_S):
            self.report_stuck(waited_s)

    def report_stuck(self, waited_s: float) -> None:
        """Tell the coordinator, once per generation, that other workers do not respond."""
        if self._reported_stuck < self.generation:
            self._reported_stuck = self.generation
            self.control.send(
                Stuck(generation=self.generation, step=self._step.number, waited_s=waited_s)
            )

    def check_membership(self) -> None:
        """Raise if this worker is not part of the run any more."""
        goodbye, trained = self.control.goodbye, self.control.trained
        if goodbye is not None and (self._is_spare or trained):
            log.info("%s leaves the run: %s", self.worker, goodbye)
            self.leave(LeftError(TRAINED if trained else LEFT))
        if goodbye is not None:
            log.error("this worker is no longer part of the run: %s", goodbye)
            self.leave(LeftError(LEFT))
        if self.control.lease_over:
            self.lease_has_ended = True
            log.error("no word from the coordinator for %g s: lease over", self.welcome.lease_s)
            self.leave(LeaseOverError(LEFT))

    def leave(self, error: LeftError) -> NoReturn:
        """End the script: this worker is not part of the run any more."""
        self.left = error
        raise error


def leave_message(worker: str, step: int, generation: Generation) -> str:
    """What to log when a worker is not in the roster of the next generation."""
    if not generation.roster:
        return f"{worker} leaves the run at step {step}: the run is stopping ({generation.reason})"
    if generation.planned:
        return f"{worker} leaves the run at step {step}, as asked: {generation.reason}"
    return f"{worker} is evicted at step {step}: {generation.reason}"


def _in_a_line(text: str) -> str:
    """As a message may carry it: an error's text may have any characters."""
    return "".join(c if c.isprintable() else " " for c in text[:MAX_UNSAVED])
