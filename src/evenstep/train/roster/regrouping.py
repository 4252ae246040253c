"""Into the next generation, after a loss or for a planned change."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from evenstep.errors import ConfigError
from evenstep.messages import Generation
from evenstep.train.comm.group import GroupGoneError, WorkerLostError
from evenstep.train.comm.local_shards import reshard
from evenstep.train.comm.rendezvous import GenerationGroups
from evenstep.train.job import Job
from evenstep.train.plan.plans import RankPlan
from evenstep.train.roster.catch_up import CatchUp
from evenstep.train.roster.checkpointing import CheckpointSaver
from evenstep.train.roster.departure import Departure
from evenstep.train.roster.generations import GenerationTracker

log = logging.getLogger("evenstep")


class Regrouping:
    """Waits for a generation, meets its workers, takes over the newest state, and goes on."""

    def __init__(
        self,
        job: Job,
        tracker: GenerationTracker,
        groups: GenerationGroups,
        catch_up: CatchUp,
        saver: CheckpointSaver,
        departure: Departure,
        on_lost: Callable[[GroupGoneError], None],
    ) -> None:
        self._job, self._tracker, self._groups = job, tracker, groups
        self._catch_up, self._saver, self._departure = catch_up, saver, departure
        self._on_lost = on_lost

    def admit(self) -> None:
        """Between two steps: let those in that have sat out the rest of the last one."""
        lost = None
        try:
            self._catch_up.admit(self._groups.control)
        except GroupGoneError as e:
            lost = e
        if self._failed(lost):
            self.run(between_steps=True)

    def run(self, planned: int = 0, *, between_steps: bool) -> bool:
        """Move to a newer generation, retrying until one forms, and take over its newest state.

        Returns whether anyone in it had trained before. A spare waits here until it is called
        back, if it is `between_steps`; otherwise it leaves.
        """
        tracker, job, stopped_s = self._tracker, self._job, self._job.step.stopped_s
        if job.host.is_shared:
            reshard(job.model.module)
        had_trained: bool | None = None
        while had_trained is None:
            generation = tracker.next(planned)
            began_s = time.monotonic()
            if generation.number == planned:
                self._see_leavers_off(generation)
            self._groups.close(0.0)
            if tracker.worker in generation.roster:
                had_trained = self._form(generation, between_steps)
            elif between_steps and tracker.worker in generation.spares:
                self._rest(generation)
                planned = 0
            else:
                self._departure.leave_roster(generation)
        self._go_on(generation, stopped_s)
        log.info(
            "%s is rank %d of %d in generation %d, at step %d after %.0f ms; %s",
            *(tracker.worker, tracker.rank, tracker.world, generation.number, job.step.number),
            *((time.monotonic() - began_s) * 1000, generation.reason),
        )
        return had_trained

    def _see_leavers_off(self, generation: Generation) -> None:
        """If workers leave, wait for everyone's step to end before anyone disconnects."""
        if set(self._tracker.roster) <= set(generation.roster):
            return
        try:
            self._groups.control.sum(torch.zeros(1))
        except GroupGoneError as e:
            log.debug("a worker disconnected before the step's end: %s", e)

    def _rest(self, generation: Generation) -> None:
        """Become a spare: out of the roster, but connected."""
        log.info("%s waits as a spare: %s", self._tracker.worker, generation.reason)
        self._tracker.rest(generation)
        self._catch_up.forget()

    def _form(self, generation: Generation, between_steps: bool) -> bool | None:
        """Meet the other workers, reduce with them, and compare positions.

        Returns whether anyone had trained before; None if the generation did not form.
        """
        job, tracker, groups = self._job, self._tracker, self._groups
        had_trained, lost = False, None
        try:
            tracker.enter(generation)
            groups.form(generation, tracker.rank, tracker.world)
            job.connect(groups.control, groups.make, on_wait=self._waited, on_lost=self._on_lost)
            resume = tracker.welcome.resume
            had_trained = self._catch_up.run(groups.control, resume, between_steps=between_steps)
        except GroupGoneError as e:
            lost = e
        return None if self._failed(lost) else had_trained

    def _failed(self, lost: GroupGoneError | None) -> bool:
        """Whether the generation could not be formed, on any process of this host."""
        if (lost := self._job.host.agree(lost)) is None:
            return False
        log.info("generation %d did not form: %s", self._tracker.generation, lost)
        if isinstance(lost, WorkerLostError):
            self._tracker.report_stuck(0.0)
        self._groups.close(0.0)
        return True

    def _waited(self, seconds: float) -> None:
        self._job.model.meter.waited(seconds)
        self._tracker.stop_waiting()

    def _go_on(self, generation: Generation, stopped_s: float) -> None:
        """Take over shares, learning-rate factor and duties of a generation that has formed."""
        job, tracker, step = self._job, self._tracker, self._job.step
        if generation.measures and job.host.is_shared:
            raise ConfigError(
                "batch.lr_rule",
                "adascale needs the norms of whole gradients, and the processes of this host have "
                "shards of them. Choose another rule: linear, sqrt or none",
            )
        if tracker.has_trained:
            step.idle_s += time.monotonic() - stopped_s
        step.measures_noise = generation.measures
        job.plans.restart([RankPlan(from_step=step.number, shares=generation.shares)])
        job.plans.warmup_steps = generation.lr_warmup_steps
        if generation.lr_factor != job.lr_scale.target:
            # A worker may be inside a step that all have reduced: that one keeps its factor.
            job.lr_scale.set_target(
                step.num_reduced, generation.lr_factor, generation.lr_warmup_steps
            )
        self._saver.set_active(generation.saves == tracker.worker)
        tracker.began_training()
