"""What all workers do together between steps: sums, evaluation, and the end of an epoch."""

from __future__ import annotations

import time

import torch

from evenstep.errors import EvenstepError
from evenstep.train.comm.summing import check_summable, summed_wide
from evenstep.train.data.evaluation import PartSampler
from evenstep.train.data.order import rank_ranges
from evenstep.train.job import Job
from evenstep.train.ports import Roster
from evenstep.train.wrong_use import check_not_sharded_since


class BetweenSteps:
    """The loop over the loader may have been left, by `break` say: its last step ends here."""

    def __init__(self, job: Job, roster: Roster) -> None:
        self._job, self._roster = job, roster

    def check_open(self, what: str) -> None:
        """Raise if the session is closed: this call needs all workers."""
        if self._job.is_over:
            raise EvenstepError(
                f"{what} was used after the session was closed: the other workers do not take part "
                "any more. Use it inside of `with evenstep.join() as session`."
            )

    def begin_loop(self) -> None:
        """A loop over the loader begins."""
        self.check_open("session.loader")
        if self._job.has_model and not self._job.host.is_shared:
            check_not_sharded_since(self._job.model.module)

    def leave_loop(self) -> bool:
        """If the loop over the loader was left, end its last step, and settle as after any step."""
        step = self._job.step
        if not step.is_left or not self._job.has_loader:
            return False
        was_step = step.is_void or step.is_done
        self._job.loader.leave()
        if was_step:
            self._roster.settle(in_loop=False)
        return True

    def sum(self, value: torch.Tensor | float) -> torch.Tensor:
        """The sum of a value over all workers."""
        self.check_open("session.sum")
        tensor = torch.as_tensor(value).detach()
        check_summable(tensor, "session.sum")
        self._roster.enter()
        self.leave_loop()
        mine = tensor.to("cpu", copy=True)  # from a GPU, this waits for its work
        began_s = time.perf_counter()
        summed = summed_wide(mine, self._roster.sum)
        if self._job.has_model:
            self._job.model.meter.waited(time.perf_counter() - began_s)
        return summed.to(tensor.device)

    def part_sampler(self, length: int, *, shuffle: bool) -> PartSampler:
        """Samples this worker's part of so many."""
        return PartSampler(length, self.begin_evaluation, self.part_of, shuffle=shuffle)

    def begin_evaluation(self) -> None:
        """Be in a generation, with running statistics averaged even if a loop was left."""
        self._roster.enter()
        step = self._job.step
        is_done = step.has_batch and step.is_done
        if self.leave_loop() or (is_done and self._job.loader.is_last):
            self._average_norms()

    def part_of(self, length: int) -> tuple[int, int]:
        """The begin and end of this worker's part of a dataset."""
        if self._roster.is_late:
            return 0, length
        plans, roster = self._job.plans, self._roster
        shares = roster.present(plans.newest.shares) if plans else (1,) * roster.world
        return rank_ranges(length, shares)[roster.rank]

    def end_epoch(self) -> None:
        """All steps of an epoch are taken."""
        self._roster.finish_epoch()
        self._average_norms()

    def _average_norms(self) -> None:
        job, roster = self._job, self._roster
        shares = roster.present(job.plans.shares_at(job.step.number - 1))
        job.model.norms.average(roster.sum, roster.world, float(shares[roster.rank]))
