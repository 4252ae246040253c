"""A roster under a coordinator: workers join, leave and die, and the user's loop never notices.

When the group fails in the middle of a step, that step is void: the loop runs on to its end with
optimizers and schedulers that do nothing, everything is rolled back, and the loader hands out the
same samples again, cut for the survivors. Planned changes take effect between two steps, when the
leader passes them on in the pulse.
"""

from __future__ import annotations

import atexit
import gc
import logging
from collections.abc import Callable

import torch

from evenstep.errors import ConfigError, EvenstepError
from evenstep.launch.environment import CoordinatorAddress
from evenstep.messages import Generation, Ready
from evenstep.train.comm.group import GroupGoneError, WorkerLostError
from evenstep.train.comm.model_check import model_digest
from evenstep.train.comm.rendezvous import GenerationGroups
from evenstep.train.comm.transfer import await_closed
from evenstep.train.exchange import pulse_size
from evenstep.train.job import Job
from evenstep.train.optimizers import check_schedulers, skip_void_steps
from evenstep.train.plan.remote import RemotePlanner
from evenstep.train.recover.rollback import Rollback
from evenstep.train.recover.state import TrainingState
from evenstep.train.roster.catch_up import CatchUp
from evenstep.train.roster.checkpointing import CheckpointSaver, open_checkpoints
from evenstep.train.roster.departure import Departure
from evenstep.train.roster.generations import GenerationTracker
from evenstep.train.roster.regrouping import Regrouping
from evenstep.train.roster.worker_info import run_settings, worker_facts
from evenstep.train.step import Phase
from evenstep.train.wrong_use import check_process_group

log = logging.getLogger("evenstep")

CLOSE_S = 15.0  # for process groups to be destroyed; on a busy host even milliseconds take long
PULSE_WORKERS = 16  # buffers allocated in advance fit the pulse of four times as many


class ElasticRoster:
    """A worker's place in a run with a coordinator."""

    hands_over_state = True

    def __init__(self, where: CoordinatorAddress, job: Job) -> None:
        self.is_late = False
        self._job = job
        self._token = where.token
        self._tracker = GenerationTracker(where, job.step, job.host)
        log.info("admitted to the run at %s as %s", where, self._tracker.worker)
        control = self._tracker.control
        self._groups = GenerationGroups(control, where.address, self._tracker.check, job.host.rank)
        self._planner = RemotePlanner(self._tracker, control)
        self._departure = departure = Departure(job, self._tracker, self._planner, where.notice)
        self.trained, self.fail, self.leave = departure.trained, departure.fail, departure.leave
        self._move_to = 0  # the generation to enter at the end of this step
        self._has_entered = False
        # Else Python's exit spends a second of CPU time on freeing torch's objects one by one.
        atexit.register(gc.freeze)
        # From `enter` on:
        self._rollback: Rollback
        self._saver: CheckpointSaver
        self._catch_up: CatchUp
        self._regrouping: Regrouping
        self._release_steps: Callable[[], None]

    @property
    def rank(self) -> int:
        return self._tracker.rank - sum(rank < self._tracker.rank for rank in self._sitting_out)

    @property
    def world(self) -> int:
        return self._tracker.world - len(self._sitting_out)

    def present(self, shares: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(share for r, share in enumerate(shares) if r not in self._sitting_out)

    @property
    def _sitting_out(self) -> tuple[int, ...]:
        return self._catch_up.sitting_out if self._has_entered else ()

    @property
    def generation(self) -> int:
        """The generation that this worker is in; 0: none yet."""
        return self._tracker.generation

    @property
    def current(self) -> Generation:
        """The coordinator's announcement of this generation."""
        return self._tracker.current

    @property
    def num_pending(self) -> int:
        return self._tracker.num_pending if self._tracker.leads else 0

    @property
    def is_ending(self) -> bool:
        return self._tracker.lease_has_ended

    @property
    def left(self) -> SystemExit | None:
        return self._tracker.left

    # Entering.

    def prepared(self) -> None:
        """Before groups close, the reducer drops its references to their operations."""
        self._groups.before_close = self._job.model.reducer.forget_operations

    def start(self) -> RemotePlanner:
        """The first shares come with the first generation."""
        return self._planner

    def enter(self) -> None:
        """Report ready, wait for a generation with this worker in it, and take over its state."""
        if self.generation:
            return
        job, tracker = self._job, self._tracker
        if not (job.has_loader and job.has_model):
            raise ConfigError("session", "call prepare(model, ...) and loader(...) first")
        check_process_group(job.host.size)
        check_schedulers(job.stateful.values())
        if not self._has_entered:  # else its first `enter` was interrupted
            self._set_up()
        tracker.control.send(
            Ready(
                **worker_facts(job),
                settings=run_settings(job),
                model=model_digest(job.model.module),
                sees_folder=self._saver.sees_folder,
            )
        )
        self.is_late = self._regrouping.run(between_steps=True)

    def _set_up(self) -> None:
        """Prepare for handing over and rolling back whatever was prepared and registered by now."""
        job, tracker = self._job, self._tracker
        model, step = job.model, job.step
        state = TrainingState({"model": model.module}, job.stateful, {})
        self._rollback = rollback = Rollback(step, model.module, job.stateful, state)
        checkpoints = open_checkpoints(tracker.welcome, self._token, tracker.control)
        every_s = tracker.welcome.checkpoint_every_s
        self._saver = saver = CheckpointSaver(job, state, checkpoints, every_s)
        tracker.control.sees_folder = saver.sees_folder
        tracker.unsaved = lambda: saver.problem
        self._catch_up = catch_up = CatchUp(job, state, rollback, saver)
        self._departure.entered(saver, rollback)
        self._regrouping = Regrouping(
            job, tracker, self._groups, catch_up, saver, self._departure, on_lost=self.lost
        )
        self._has_entered = True
        self._release_steps = skip_void_steps(
            step,
            job.stateful.values(),
            rollback.before_optimizer_step,
            job.updates.scheduler_stepped,
        )
        job.updates.watch(lambda: rollback.changes)
        step.on_fetched.insert(0, rollback.begin_step)  # before the meter starts
        step.on_void.append(rollback.step_is_void)
        step.on_reduced.append(rollback.alternation.backward)
        step.on_reduced.append(tracker.stop_waiting)
        model.reducer.warm_up(pulse_size(PULSE_WORKERS))
        if not job.host.is_shared:  # else the processes of the host would be out of step
            model.reducer.give_up_if(self._superseded, model.module)
        if tracker.welcome.underway:
            catch_up.preallocate()

    # In a step.

    def move_on(self, num: int) -> None:
        """Move on by so many generations at the end of this step."""
        self._move_to = self.generation + num

    def lost(self, error: GroupGoneError) -> None:
        """Make the step void. Closing the groups unblocks workers that still wait in them.

        The loop runs on to its end; `settle` does the rest. Raises if the loop was told already
        that the step stands.
        """
        step = self._job.step
        if step.has_batch and step.stands:
            raise EvenstepError(
                f"a worker was lost in step {step.batch.step} when session.attempt, or the window "
                "of session.accumulate, was over: the loop has counted the batch, so what is left "
                "of its step cannot be repeated. Do every forward and backward pass of a batch, "
                "and session.gather, inside of the one call or window; session.sum may come later. "
                "Resume with evenstep run --resume."
            ) from error
        log.info("step %d is void: %s", step.number, error)
        if isinstance(error, WorkerLostError) or self._sitting_out:
            self._tracker.report_stuck(0.0)
        step.void()
        self._groups.close(0.0)

    def _superseded(self) -> str:
        if self._sitting_out:
            return (
                "workers that joined in the middle of this step cannot take part in its gradients"
            )
        return self._tracker.superseded()

    # Between steps.

    def settle(self, *, in_loop: bool) -> int:
        """Repeat a void step with the survivors, or make the change that the leader passed on."""
        tracker, job, step = self._tracker, self._job, self._job.step
        must_move = tracker.must_move()
        if self._rollback.is_due:
            self._rollback.settle()
        if must_move or not self._groups.is_open:  # a step begun now would be void
            self._regrouping.run(between_steps=in_loop)
        if step.is_void:
            step.retry()
        if in_loop and self._catch_up.sitting_out:
            self._regrouping.admit()
        # No planned change while gradients accumulate. Nor after a loop that was left: a joiner
        # would begin with the next loop and miss the sums before it.
        if self._move_to and in_loop and not step.num_unused:
            move_to, self._move_to = self._move_to, 0
            if move_to > self.generation:
                self._regrouping.run(move_to, between_steps=True)
        self.is_late = False
        if step.phase is Phase.ADOPTED:  # in the middle of a batch: others may be ahead in it
            self._overtake()
        elif self._saver.is_active and job.host.first_decides(self._saver.is_due):
            self._saver.save()
        return self.generation

    def fall_behind(self) -> None:
        """Until this worker's loop is in the others' epoch, its sums are of its own values."""
        self.is_late = True
        self._overtake()

    def _overtake(self) -> None:
        """Discard what the script does until it has caught up with the others."""
        log.info("others are further on in the script, at step %d", self._job.step.number)
        self._rollback.overtake()
        self._job.model.reducer.fill_missing()

    def finish_epoch(self) -> None:
        """A barrier: all workers have the epoch's last step, and those behind get it here."""
        self.sum(torch.zeros(1))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all workers, repeated in the next generation if the group fails."""
        try:
            return self._sum(self._job.host.sum(values))
        finally:
            self._tracker.stop_waiting()

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        step = self._job.step
        if self.is_late:
            log.warning(
                "session.sum before this worker's first batch, in a run that is at step %d: the "
                "others have taken that sum, and this one is of this worker's own value only",
                step.number,
            )
            return values
        self._rollback.rejoin()
        self._regroup_if_lost()  # first: others may have taken sums that this worker has not
        wanted = step.num_sums + 1
        while step.num_sums < wanted:
            if step.is_void:  # on all workers: the result is discarded with the step
                return torch.zeros_like(values)
            mine, lost = values.clone(), None
            try:
                self._catch_up.sum(self._groups.control, mine)
            except GroupGoneError as e:
                lost = e
            if (lost := self._job.host.agree(lost)) is None:
                self._catch_up.summed(mine)
                continue
            if step.has_batch and not self._rollback.is_past_reduction:
                self.lost(lost)  # the batch was cut for a roster that is gone
                return torch.zeros_like(values)
            log.info("repeating a sum: %s", lost)
            self._groups.close(0.0)
            self._regroup_if_lost()
        return self._catch_up.last_sum(values)

    def _regroup_if_lost(self) -> None:
        """Regroup in the middle of the loop's body, which may have run on since the loss."""
        if not self._groups.is_open:
            if self._job.step.is_void:
                self._rollback.restore()
            self._regrouping.run(between_steps=False)

    # The end. What needs the coordinator is up to `Departure`.

    def close(self) -> None:
        """Make the script's objects work as before, and destroy the process groups."""
        if self._has_entered:
            self._release_steps()
        self._groups.close()
        await_closed(CLOSE_S)
