"""When this worker writes checkpoints, and whether it still may."""

from __future__ import annotations

import logging
import socket
import time
from contextlib import suppress
from pathlib import Path

from evenstep.coordinate.term import read_term
from evenstep.errors import ConfigError, EvenstepError
from evenstep.identity import run_id
from evenstep.messages import Welcome
from evenstep.train.comm.local_shards import reshard, whole
from evenstep.train.job import Job
from evenstep.train.recover.checkpoint import Checkpoints
from evenstep.train.recover.state import TrainingState
from evenstep.train.roster.control import Control

log = logging.getLogger("evenstep")

NEWS_S = 30.0  # for a generation that the folder names to be announced to this worker


class NotOursError(EvenstepError):
    """The run folder holds another run, or goes on without this worker."""


class CheckpointSaver:
    """Writes checkpoints while this worker is the one to do so.

    `checkpoints` is None if the run's folder is not on this host.
    """

    def __init__(
        self,
        job: Job,
        state: TrainingState,
        checkpoints: Checkpoints | None,
        every_s: float,
    ) -> None:
        self._job, self._state, self._checkpoints = job, state, checkpoints
        self._every_s = every_s
        self._saved_s, self._saved_step = time.monotonic(), -1
        self.is_active = False  # this is the worker that writes them

    @property
    def sees_folder(self) -> bool:
        """Whether this worker can write checkpoints to the run's folder."""
        return self._checkpoints is not None

    @property
    def is_torn(self) -> bool:
        """Whether this worker's state is a mixture of two, since a handover was interrupted."""
        return self._state.torn

    @property
    def problem(self) -> str:
        """Why the last checkpoint is not written; empty if it is, or if another worker writes."""
        if self._checkpoints is None or not self.is_active:
            return ""
        return self._checkpoints.problem

    def set_active(self, active: bool) -> None:
        """A generation begins. A new writer counts from the previous writer's last checkpoint."""
        if active and not self.is_active and self._checkpoints is not None:
            written_s = time.monotonic() - self._checkpoints.age_s()
            self._saved_s = max(self._saved_s, written_s)
        self.is_active = active

    def load(self, newest: str) -> None:
        """Continue from the run's newest checkpoint, if it has one.

        `newest` is what the coordinator knows of, on its own host.
        """
        found = self._checkpoints.newest() if self._checkpoints is not None else None
        if found is None and newest:
            raise ConfigError(
                "resume",
                f"the run's newest checkpoint is {newest} on the coordinator's host, but "
                f"{socket.gethostname()}, whose worker leads, cannot use it. If the log does not "
                "say why, share the folder between the hosts, or start the first worker on the "
                "coordinator's host",
            )
        if found is not None:
            self._state.apply(self._state.parts_of(found.tree))
            self._job.load_plain_state(self._state.plain)
            log.info("resuming from %s at step %d", found.path.name, self._job.step.number)

    @property
    def is_due(self) -> bool:
        """Whether the last checkpoint is old enough for the next one."""
        return bool(self._every_s) and time.monotonic() - self._saved_s > self._every_s

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint of the committed steps; never while gradients accumulate."""
        step = self._job.step
        if self._checkpoints is None or step.num_unused:
            return
        self._saved_s, self._saved_step = time.monotonic(), step.number
        self._state.plain = self._job.plain_state()
        reshard(self._job.model.module)
        if self._job.host.is_first:
            self._checkpoints.save(step.number, self._state)
        else:
            self._state.flatten(take=whole)  # takes part in gathering sharded tensors
        if wait:
            self._checkpoints.close()

    def last_is_due(self) -> bool:
        """Training is over: whether the last step still needs a checkpoint from this worker."""
        step = self._job.step
        if not self.is_active or self._saved_step == step.number:
            return False
        if step.num_unused:
            log.warning(
                "no checkpoint of the last step: no optimizer step used the gradients of the last "
                "%d batches",
                step.num_unused,
            )
        return not step.num_unused

    def close(self) -> None:
        """Wait until the last checkpoint is on disk."""
        if self._checkpoints is not None:
            self._checkpoints.close()


class RunFence:
    """Keeps a worker from writing to the folder of another run, or of a run that dropped it."""

    def __init__(self, folder: Path, token: str, control: Control) -> None:
        self._folder, self._token, self._control = folder, token, control
        self.run = run_id(token)

    def position(self) -> tuple[int, int]:
        """The term and the newest generation that this worker has heard of."""
        return self._control.term, self._control.newest

    def check(self) -> None:
        """Raise NotOursError if this worker may not write to the folder."""
        if not self.holds_run():
            raise NotOursError(f"{self._folder} does not hold this run, {self.run}, any more")
        fence = (0, 0)
        with suppress(FileNotFoundError):  # the coordinator is of an older evenstep
            fence = read_term(self._folder).fence
        control, until_s = self._control, time.monotonic() + NEWS_S
        while self.position() < fence and control.connected and control.goodbye is None:
            if time.monotonic() > until_s:
                break
            control.wait(0.05)
        if (position := self.position()) < fence:
            why = "the run goes on without this worker, which knows of term {} and generation {}"
            self._control.expel(why.format(*position))
            raise NotOursError(why.format(*position))

    def holds_run(self) -> bool:
        """Whether the folder is this run's: it has the same token."""
        with suppress(OSError):
            content = (self._folder / "token").read_text(encoding="utf-8", errors="replace")
            return content.split()[:1] == [self._token]
        return False


def open_checkpoints(welcome: Welcome, token: str, control: Control) -> Checkpoints | None:
    """The run's checkpoints, if its folder is on this host."""
    if not welcome.run:
        return None
    folder = Path(welcome.run)
    fence = RunFence(folder, token, control)
    if not fence.holds_run():
        log.info("%s is not on this host: this worker writes no checkpoints", folder)
        return None
    return Checkpoints(folder / "checkpoints", keep=welcome.checkpoints_kept, fence=fence)
