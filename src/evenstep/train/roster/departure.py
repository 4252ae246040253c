"""The end of a worker's part in a run: trained to the end, failed, or out of the roster."""

from __future__ import annotations

import logging
import time
import traceback
from typing import NoReturn

from evenstep.messages import Done, Failed, Generation, Leaving
from evenstep.train.job import Job
from evenstep.train.plan.remote import RemotePlanner
from evenstep.train.recover.rollback import Rollback
from evenstep.train.roster.checkpointing import CheckpointSaver
from evenstep.train.roster.generations import (
    LEFT,
    GenerationTracker,
    LeaseOverError,
    LeftError,
    leave_message,
)
from evenstep.train.roster.notices import watch_notices
from evenstep.train.roster.sigterm import ScriptInterrupt, SigtermNotice
from evenstep.train.step import Phase

log = logging.getLogger("evenstep")

GOODBYE_S = 10.0  # for the coordinator's answer when this worker is done
MAX_TRACEBACK = 100_000  # characters


class Departure:
    """Writes the last checkpoint if this worker saves them, and leaves the run."""

    def __init__(
        self, job: Job, tracker: GenerationTracker, planner: RemotePlanner, notice: str
    ) -> None:
        self._job, self._tracker, self._planner = job, tracker, planner
        self._sigterm = SigtermNotice(lambda: tracker.control.send(Leaving(why="SIGTERM")))
        self._notices = watch_notices(notice, tracker.control) if job.host.is_first else None
        self._interrupt = ScriptInterrupt(self._leave_script)
        tracker.interrupt = self._interrupt.send
        self._failed = False
        # From `entered` on:
        self._saver: CheckpointSaver | None = None
        self._rollback: Rollback

    def entered(self, saver: CheckpointSaver, rollback: Rollback) -> None:
        """This worker has a state to save."""
        self._saver, self._rollback = saver, rollback

    def leave_roster(self, generation: Generation, *, interrupts: bool = False) -> NoReturn:
        """End this worker: the next generation is without it."""
        worker = self._tracker.worker
        self._interrupt.close()
        # The processes of a shared host write a checkpoint together, never at different points.
        if worker == generation.saves and not (interrupts and self._job.host.is_shared):
            self._save_committed(interrupts=interrupts)
        self._planner.close(self._job.step)
        log.info("%s", leave_message(worker, self._job.step.number, generation))
        self._tracker.leave(LeftError(LEFT))

    def _leave_script(self) -> None:
        """Evicted while the script is busy: exit from within it."""
        if (generation := self._tracker.left_out) is not None:
            self.leave_roster(generation, interrupts=True)

    def trained(self) -> None:
        """Write the last checkpoint, before the script does anything else to the model."""
        if self._saver is None or not self._saver.last_is_due():
            return
        try:
            self._save_committed(wait=False)  # others may wait for a sum after the loop
        except Exception:  # training is over: no reason to fail the script
            log.exception("the last checkpoint was not written")

    def fail(self, error: BaseException) -> None:
        """Tell the coordinator why the script failed, unless it merely exits."""
        self._failed, host = True, self._job.host
        saves = self._saver is not None and self._saver.is_active and not host.is_shared
        if isinstance(error, LeaseOverError) and saves:
            self._save_committed()
        if not isinstance(error, SystemExit):
            host.end_if_killed()
            text = "".join(traceback.format_exception(error)).encode(errors="replace").decode()
            self._tracker.control.send(Failed(told=text[-MAX_TRACEBACK:]))
        host.failed()

    def leave(self) -> None:
        """Finish the last checkpoint, report done, and disconnect from the coordinator."""
        control, step = self._tracker.control, self._job.step
        if self._saver is not None:
            self._rollback.settle()
            if step.is_void:
                step.retry()
            if not self._failed:
                self.trained()  # if the script did not run session.epochs(...) to its end
            self._saver.close()
        self._sigterm.close()
        if self._notices is not None:
            self._notices.close()
        self._interrupt.close()
        if not self._failed:
            self._planner.close(step)
            control.send(Done(step=step.number))
            until_s = time.monotonic() + GOODBYE_S
            while control.connected and control.goodbye is None and time.monotonic() < until_s:
                control.wait(0.05)
            why = control.goodbye or "trained to the end"
            log.info("%s leaves the run at step %d: %s", self._tracker.worker, step.number, why)
        control.close()

    def _save_committed(self, *, wait: bool = True, interrupts: bool = False) -> None:
        """Write a last checkpoint of the committed steps, if this worker still has that state.

        It does not between a step's reduction and the step's end, when optimizers and schedulers
        may or may not have stepped; nor if it cannot undo what the step has changed so far. If this
        `interrupts` the script, it must be in a forward pass: at other times the script may have
        exchanged the parameters, to evaluate an average of them say.
        """
        if self._saver is None or not self._tracker.has_trained or self._saver.is_torn:
            return
        step, rollback = self._job.step, self._rollback
        # A void step stays unfinished until the next batch: its forward pass may have updated
        # buffers after the group was lost.
        if interrupts or step.has_batch or step.is_void:
            adopted = step.phase in (Phase.ADOPTED, Phase.OVERTAKEN)
            kept = not adopted and not rollback.is_past_reduction and rollback.is_possible
            if interrupts:
                kept = kept and step.phase is Phase.FETCHED and rollback.keeps_parameters
            if not kept:
                log.warning(
                    "no checkpoint of step %d: the script was in the middle of it, or past it; the "
                    "newest checkpoint stands",
                    step.number,
                )
                return
            rollback.restore()
        self._tracker.saving = True
        try:
            self._saver.save(wait=wait)
        finally:
            self._tracker.saving = False
