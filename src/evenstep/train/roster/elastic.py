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
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch

from evenstep.errors import ConfigError, EvenstepError
from evenstep.launch.environment import CoordinatorAddress
from evenstep.messages import Began, Done, Failed, Generation, Leaving, Ready
from evenstep.train.comm.group import GroupGoneError, WorkerLostError
from evenstep.train.comm.model_check import model_digest
from evenstep.train.comm.shards import reshard
from evenstep.train.comm.transfer import await_closed
from evenstep.train.exchange import pulse_size
from evenstep.train.job import Job
from evenstep.train.optimizers import check_schedulers, skip_void_steps
from evenstep.train.plan.plans import RankPlan
from evenstep.train.plan.remote import RemotePlanner
from evenstep.train.recover.rollback import Rollback
from evenstep.train.recover.state import TrainingState
from evenstep.train.roster.catch_up import CatchUp
from evenstep.train.roster.checkpointing import CheckpointSaver, open_checkpoints
from evenstep.train.roster.generations import (
    EVICTED,
    LEFT,
    GenerationTracker,
    LeaseOverError,
    LeftError,
    leave_message,
)
from evenstep.train.roster.groups import GenerationGroups
from evenstep.train.roster.sigterm import ScriptInterrupt, SigtermNotice
from evenstep.train.roster.worker_info import run_settings, worker_facts
from evenstep.train.step import Phase
from evenstep.train.wrong_use import check_process_group

log = logging.getLogger("evenstep")

GOODBYE_S = 10.0  # for the coordinator's answer when this worker is done
CLOSE_S = 15.0  # for process groups to be destroyed; on a busy host even milliseconds take long
MAX_TRACEBACK = 100_000  # characters
PULSE_WORKERS = 16  # buffers made beforehand have room for the pulse of four times as many


class ElasticRoster:
    """A worker's place in a run with a coordinator."""

    hands_over_state = True

    def __init__(self, where: CoordinatorAddress, job: Job) -> None:
        self.rank, self.world, self.is_late = 0, 1, False
        self._job = job
        self._token = where.token
        self._tracker = GenerationTracker(where, job.step, job.host)
        log.info("admitted to the run at %s as %s", where, self._tracker.worker)
        control = self._tracker.control
        self._groups = GenerationGroups(control, where.address, self._tracker.check, job.host.rank)
        self._planner = RemotePlanner(self._tracker, control)
        self._sigterm = SigtermNotice(lambda: control.send(Leaving(why="SIGTERM")))
        self._interrupt = ScriptInterrupt(self._leave_script)
        self._tracker.interrupt = self._interrupt.send
        self._lost_group = False  # and there is no other yet
        self._move_to = 0  # the generation to enter at the end of this step
        self._is_overtaken = False  # this worker's state is of others that are ahead of its script
        self._failed = self._has_entered = False
        # Else Python's exit takes a second of CPU time to free torch's objects one by one.
        atexit.register(gc.freeze)
        # From `enter` on:
        self._state: TrainingState
        self._rollback: Rollback
        self._saver: CheckpointSaver
        self._catch_up: CatchUp
        self._release_steps: Callable[[], None]

    @property
    def generation(self) -> int:
        """The generation that this worker is in; 0: none yet."""
        return self._tracker.generation

    @property
    def current(self) -> Generation:
        """The coordinator's announcement of this generation."""
        return self._tracker.current

    # Entering, and settling between steps.

    def prepared(self) -> None:
        """Nothing to do yet: `enter` takes what was prepared and registered by then."""

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
        if not self._has_entered:  # else it was interrupted while it waited
            self._set_up()
        tracker.control.send(
            Ready(
                **worker_facts(job),
                settings=run_settings(job),
                model=model_digest(job.model.module),
                sees_folder=self._saver.sees_folder,
            )
        )
        self.is_late = self._regroup()

    def _set_up(self) -> None:
        """Prepare for handing over and rolling back whatever was prepared and registered by now."""
        job, tracker = self._job, self._tracker
        model, step = job.model, job.step
        self._state = TrainingState({"model": model.module}, job.stateful, {})
        self._rollback = Rollback(step, model.module, job.stateful, self._state)
        checkpoints = open_checkpoints(tracker.welcome, self._token, tracker.control)
        every_s = tracker.welcome.checkpoint_every_s
        self._saver = CheckpointSaver(job, self._state, checkpoints, every_s)
        tracker.control.sees_folder = self._saver.sees_folder
        self._catch_up = CatchUp(job, self._state, self._rollback, self._saver)
        self._has_entered = True
        self._release_steps = skip_void_steps(
            step, job.stateful.values(), self._rollback.before_optimizer_step
        )
        step.on_fetched.insert(0, self._rollback.begin_step)  # before the meter starts
        step.on_reduced.append(tracker.stop_waiting)
        model.reducer.warm_up(pulse_size(PULSE_WORKERS))
        if not job.host.is_shared:  # else the processes of the host would be out of step
            model.reducer.give_up_if(tracker.superseded, model.module)
        if tracker.welcome.underway:
            self._catch_up.preallocate()

    @property
    def is_ending(self) -> bool:
        return self._tracker.lease_has_ended

    def settle(self, *, in_loop: bool) -> int:
        """Repeat a void step with the survivors, or make the change that the leader passed on."""
        tracker, step, host = self._tracker, self._job.step, self._job.host
        tracker.check_membership()  # a worker that trains alone never waits, and would not notice
        self._rejoin()
        newest = host.first_decides(lambda: tracker.newest)
        if self._lost_group or newest > self.generation:  # a step begun now would be void
            self._regroup(may_rest=in_loop)
        if step.is_void:
            self._rollback.finish()
            step.retry()
        # While gradients accumulate, nobody may stop and nobody can join.
        if self._move_to and not step.num_unused:
            move_to, self._move_to = self._move_to, 0
            if move_to > self.generation:
                self._regroup(move_to, may_rest=in_loop)
        self.is_late = False
        if step.phase is Phase.ADOPTED:  # in the middle of a batch: others may be further on in it
            self._overtake()
        elif self._saver.is_active and host.first_decides(lambda: self._saver.is_due):
            self._saver.save()
        return self.generation

    def fall_behind(self) -> None:
        """Until this worker's loop is in the others' epoch, its sums are of its own values."""
        self.is_late = True
        self._overtake()

    def _overtake(self) -> None:
        """Discard what the script does until it is where the workers are whose state this is."""
        self._rejoin()  # again, as in the next loop over an epoch that is over: undo the last one
        log.info("others are further on in the script, at step %d", self._job.step.number)
        self._is_overtaken = True
        self._rollback.begin_step()
        self._rollback.step_is_void()
        self._job.model.reducer.fill_missing()
        self._job.step.overtake()

    def _rejoin(self) -> None:
        """The script is where the others are: undo what it did on the way."""
        if self._is_overtaken:
            self._is_overtaken = False
            self._rollback.finish()
            self._job.step.rejoin()

    def finish_epoch(self) -> None:
        """Nobody goes on before all have the epoch's last step; workers behind get it here."""
        self.sum(torch.zeros(1))

    # Step by step.

    def backward_done(self) -> int:
        """A backward pass ends. Returns, on the leader, by how many generations to move on."""
        self._rollback.alternation.backward()
        return self._tracker.num_pending if self._tracker.leads else 0

    @property
    def _is_reduced(self) -> bool:
        """Whether all workers have reduced the last backward pass of the batch in hand."""
        step = self._job.step
        reduced = step.has_batch and step.num_reduced > step.batch.step
        return reduced and not self._rollback.alternation.expected

    def move_on(self, num: int) -> None:
        """Move on by so many generations at the end of this step."""
        self._move_to = self.generation + num

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
        self._rejoin()
        if self._lost_group:
            self._regroup()  # first: workers ahead may have taken sums that this one has not
        wanted = step.num_sums + 1
        while step.num_sums < wanted:
            if self._lost_group:
                self._regroup()
                continue
            if step.is_void:  # on all workers: the result is discarded with the step
                return torch.zeros_like(values)
            mine, lost = values.clone(), None
            try:
                self._groups.control.sum(mine)
            except GroupGoneError as e:
                lost = e
            if (lost := self._job.host.agree(lost)) is None:
                self._catch_up.summed(mine)
                continue
            if step.has_batch and not self._is_reduced:
                self.lost(lost)  # the batch was cut for a roster that is gone
                return torch.zeros_like(values)
            log.info("repeating a sum: %s", lost)
            self._lost_group = True
            self._close_groups()
        return self._catch_up.last_sum(values)

    def lost(self, error: GroupGoneError) -> None:
        """Make the step void. Closing the group unblocks workers that still wait in it."""
        step = self._job.step
        log.info("step %d is void: %s", step.number, error)
        if isinstance(error, WorkerLostError):
            self._tracker.report_stuck(0.0)
        self._job.settings.step_is_void()
        step.void()
        self._lost_group = True
        if not self._rollback.is_possible:
            raise EvenstepError(
                f"step {step.number} is void, but an optimizer had already stepped in it before "
                "its last backward pass, for the first time, and that cannot be undone. Resume "
                "from the newest checkpoint with evenstep run --resume."
            ) from error
        self._rollback.restore()
        self._rollback.step_is_void()
        self._close_groups()

    # Into a new generation.

    def _regroup(self, planned: int = 0, *, may_rest: bool = False) -> bool:
        """Move to a newer generation, retrying until one forms, and take over its newest state.

        Returns whether anyone in it had trained before. A spare waits here until it is called
        back, if it `may_rest` at this point of the loop; otherwise it leaves.
        """
        tracker, job, step = self._tracker, self._job, self._job.step
        if step.is_void:
            self._rollback.restore()  # again: the pass may have run on after the group was lost
        reshard(job.model.module)
        while True:
            generation = tracker.next(planned)
            began_s = time.monotonic()
            if generation.number == planned:
                self._see_leavers_off(generation)
            self._close_groups()
            if may_rest and tracker.worker in generation.spares:
                log.info("%s waits as a spare: %s", tracker.worker, generation.reason)
                tracker.rest(generation)
                self._catch_up.forget()
                planned = 0
                continue
            if tracker.worker not in generation.roster:
                self._leave_roster(generation)
            had_trained, lost = False, None
            try:
                self.rank, self.world = tracker.enter(generation)
                self._groups.form(generation, self.rank, self.world)
                control, make = self._groups.control, self._groups.make
                job.connect(control, make, on_wait=self._waited, on_lost=self.lost)
                had_trained = self._catch_up.run(control, tracker.welcome.resume)
            except GroupGoneError as e:
                lost = e
            if (lost := job.host.agree(lost)) is None:
                break
            log.info("generation %d did not form: %s", generation.number, lost)
            if isinstance(lost, WorkerLostError):
                tracker.report_stuck(0.0)
        self._lost_group = False
        tracker.began_training()
        self._take_terms(generation)
        log.info(
            "%s is rank %d of %d in generation %d, at step %d after %.0f ms; %s",
            *(tracker.worker, self.rank, self.world, generation.number, step.number),
            *((time.monotonic() - began_s) * 1000, generation.reason),
        )
        return had_trained

    def _take_terms(self, generation: Generation) -> None:
        """Shares, learning-rate factor and duties of a generation that has formed."""
        job, tracker, step = self._job, self._tracker, self._job.step
        self._saver.set_active(generation.saves == tracker.worker)
        job.plans.restart([RankPlan(from_step=step.number, shares=generation.shares)])
        if generation.measures and job.host.is_shared:
            raise ConfigError(
                "batch.lr_rule",
                "adascale needs the norms of whole gradients, and the processes of this host have "
                "shards of them. Choose another rule: linear, sqrt or none",
            )
        step.measures_noise = generation.measures
        job.plans.warmup_steps = generation.lr_warmup_steps
        if generation.lr_factor != job.lr_scale.target:
            # A worker may be inside a step that all have reduced: that one keeps its factor.
            job.lr_scale.set_target(
                step.num_reduced, generation.lr_factor, generation.lr_warmup_steps
            )
        if tracker.leads:
            self._planner.watch_closely()
            tracker.control.send(Began(generation=generation.number, step=step.number))

    def _see_leavers_off(self, generation: Generation) -> None:
        """If somebody leaves, wait for everyone's step to end before anyone disconnects."""
        if set(self._tracker.roster) <= set(generation.roster):
            return
        try:
            self._groups.control.sum(torch.zeros(1))
        except GroupGoneError as e:
            log.debug("a worker disconnected before the step's end: %s", e)

    def _leave_script(self) -> None:
        """The script is at something else, and this worker is out of the roster: end it there."""
        if (generation := self._tracker.left_out) is not None:
            self._leave_roster(generation, interrupts=True)

    def _leave_roster(self, generation: Generation, *, interrupts: bool = False) -> NoReturn:
        """End this worker: the next generation is without it."""
        worker = self._tracker.worker
        self._interrupt.close()
        # Processes of a shared host make a checkpoint together: not where each happens to be.
        if worker == generation.saves and not (interrupts and self._job.host.is_shared):
            self._save_committed(interrupts=interrupts)
        log.info("%s", leave_message(worker, self._job.step.number, generation))
        asked = generation.planned or worker in generation.spares
        raise LeftError(LEFT if asked else EVICTED)

    def _waited(self, seconds: float) -> None:
        self._job.model.meter.waited(seconds)
        self._tracker.stop_waiting()

    def _close_groups(self) -> None:
        if self._job.has_model:
            self._job.model.reducer.forget_operations()
        self._groups.close(0.0)

    # Checkpoints, and the end.

    def _save_committed(self, *, wait: bool = True, interrupts: bool = False) -> None:
        """Write a last checkpoint of the committed steps, if this worker still has that state.

        It does not between a step's reduction and the step's end, when optimizers and schedulers
        may or may not have stepped; nor if it cannot undo what the step has changed so far. If this
        `interrupts` the script, it must be in a forward pass: at other times the script may have
        exchanged the parameters, to evaluate an average of them say.
        """
        if not self._tracker.has_trained or self._state.torn:
            return
        step, rollback = self._job.step, self._rollback
        # A void step stays unfinished until the next batch: its forward pass may have updated
        # buffers after the group was lost.
        if interrupts or step.has_batch or step.is_void:
            adopted = step.phase in (Phase.ADOPTED, Phase.OVERTAKEN)
            kept = not adopted and not self._is_reduced and rollback.is_possible
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

    def trained(self) -> None:
        """Write the last checkpoint, before the script does anything else to the model."""
        if not self._has_entered or not self._saver.last_is_due():
            return
        try:
            self._save_committed(wait=False)  # others may wait for a sum after the loop
        except Exception:  # training is over, and the script has the model
            log.exception("the last checkpoint was not written")

    def fail(self, error: BaseException) -> None:
        """Tell the coordinator why the script failed, unless it merely exits."""
        self._failed = True
        saves = self._has_entered and self._saver.is_active and not self._job.host.is_shared
        if isinstance(error, LeaseOverError) and saves:
            self._save_committed()
        if not isinstance(error, SystemExit):
            self._job.host.end_if_killed()
            text = "".join(traceback.format_exception(error)).encode(errors="replace").decode()
            self._tracker.control.send(Failed(told=text[-MAX_TRACEBACK:]))
        self._job.host.failed()

    def leave(self) -> None:
        """Finish the last checkpoint, report done, and disconnect from the coordinator."""
        control, step = self._tracker.control, self._job.step
        self._rejoin()
        if step.is_void:
            self._rollback.finish()
            step.retry()
        if not self._failed:
            self.trained()  # if the script did not run session.epochs(...) to its end
        if self._has_entered:
            self._saver.close()
        self._sigterm.close()
        self._interrupt.close()
        if not self._failed:
            control.send(Done(step=step.number))
            until_s = time.monotonic() + GOODBYE_S
            while control.connected and control.goodbye is None and time.monotonic() < until_s:
                control.wait(0.05)
            why = control.goodbye or "trained to the end"
            log.info("%s leaves the run at step %d: %s", self._tracker.worker, step.number, why)
        control.close()

    def close(self) -> None:
        """Make the script's objects work as before, and destroy the process groups."""
        if self._has_entered:
            self._release_steps()
        self._groups.close()
        await_closed(CLOSE_S)
