"""The processes that a run's launcher has started: who is on the way, and what an end means."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass
from enum import Enum

from evenstep.ports import Launcher
from evenstep.types import Launch, WorkerId

log = logging.getLogger("evenstep")

AGAIN = os.EX_TEMPFAIL  # of a worker that lost its place, by no fault of the script
# A group that is still being let go as the interpreter ends aborts a process that is through.
ABORTED = -signal.SIGABRT


class Meaning(Enum):
    """What the end of a process means for the run."""

    FINE = "fine"  # nothing more was expected of it
    REPLACE = "replace"  # no fault of the script
    FAILURE = "failure"  # the script's own
    MISSING = "missing"  # it will not come; the others go on


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a process, not judged yet."""

    code: int  # negative: the signal that ended it
    said: str  # its last output
    at_s: float


class Crew:
    """Launched workers, from their start to what their end meant."""

    def __init__(self, launcher: Launcher | None, restarts: int) -> None:
        self.launcher = launcher
        self.restarts_left = restarts
        self.running: set[WorkerId] = set()
        self.exits: dict[WorkerId, Exit] = {}
        self.in_order: set[WorkerId] = set()  # their part is over, as it should be
        self.evicted: set[WorkerId] = set()
        self.missed: set[WorkerId] = set()  # lost from the roster, whatever its process does then
        self.relieved: set[WorkerId] = set()  # a spare has taken their place
        self.refused: dict[WorkerId, str] = {}
        self.began = False
        self._started_s: dict[WorkerId, float] = {}

    def late(self, now_s: float, most_s: float, starting: set[WorkerId]) -> list[WorkerId]:
        """Who of those that start up was started longer ago than that."""
        return [w for w in starting if now_s - self._started_s.get(w, now_s) > most_s]

    def launch(
        self, num_workers: int, reason: str, kind: str = "", now_s: float = 0.0
    ) -> list[str]:
        """Start workers one by one; why some could not be started."""
        failures = []
        for _ in range(num_workers):
            before = set(self.running)
            try:
                if self.launcher is None:
                    raise RuntimeError("this run starts no workers itself; join some")
                self.launcher.launch(Launch(num_workers=1, kind=kind, reason=reason))
                self._started_s |= dict.fromkeys(self.running - before, now_s)
            except Exception as e:  # whatever a launcher meets, the run goes on without it
                log.warning("a worker could not be started: %s", e)
                self.running &= before
                failures.append(str(e) or type(e).__name__)
        return failures

    def add(self, worker: WorkerId) -> None:
        """A worker is being started."""
        self.running.add(worker)
        self.began = True

    def evict(self, worker: WorkerId) -> None:
        """A worker is not wanted any more, whatever it does."""
        self.evicted.add(worker)
        if self.launcher is not None and worker in self.running:
            self.launcher.stop(worker)

    def fails_late(self, worker: WorkerId, code: int) -> bool:
        """Whether an end after that of the run was none in order, and none of our doing."""
        if code < 0 and worker in self.missed:
            return False  # the signal took it within the run, and the others went on
        return code not in (0, AGAIN) and worker not in self.evicted

    def meaning(self, worker: WorkerId, code: int, *, joined: bool, alone: bool) -> Meaning:
        """What its end means. `joined`: it was in a roster. `alone`: nobody else trains."""
        if worker in self.in_order:
            return Meaning.FINE
        if worker in self.evicted or (code == AGAIN and worker not in self.refused) or code < 0:
            return Meaning.REPLACE
        if code > 0:
            return Meaning.FAILURE if joined or alone else Meaning.MISSING
        if joined:
            return Meaning.FINE
        return Meaning.FAILURE if alone and not self.running else Meaning.MISSING


def told_of(code: int, *, joined: bool) -> str:
    """An exit code in words, to be put after a worker's name."""
    if code < 0:
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"
    if code == 0 and not joined:
        return "ended without joining the run: does the script call evenstep.join()?"
    return f"ended with exit code {code}"
