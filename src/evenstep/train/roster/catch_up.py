"""At the start of a generation: bring workers that are behind to the newest state."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from evenstep.errors import EvenstepError
from evenstep.train.comm.group import Group
from evenstep.train.failpoint import failpoint
from evenstep.train.job import Job
from evenstep.train.recover.handover import hand_over
from evenstep.train.recover.preallocate import Preallocation
from evenstep.train.recover.rollback import Rollback
from evenstep.train.recover.state import TrainingState
from evenstep.train.roster.checkpointing import CheckpointSaver
from evenstep.train.roster.position import Position, compare_positions


class CatchUp:
    """This worker's position, and the result of the last sum, for workers that missed it."""

    def __init__(
        self, job: Job, state: TrainingState, rollback: Rollback, saver: CheckpointSaver
    ) -> None:
        self._job, self._state, self._rollback = job, state, rollback
        self._saver, self._preallocation = saver, Preallocation()
        self.position = self._position_before = Position()
        self._last_sum = torch.zeros(0, dtype=torch.uint8)  # its bytes

    def preallocate(self) -> None:
        """Make room for the state that the others will hand over, while they train."""
        self._preallocation.make(self._job.stateful.values())

    def begin_step(self) -> None:
        """Remember where to return to if the step turns out void."""
        self._position_before = self.position
        self._rollback.begin_step()

    def reduced(self) -> None:
        """The step at hand is reduced."""
        self.position = replace(self.position, steps=self._job.step.number + 1)

    def summed(self, result: torch.Tensor) -> None:
        """A sum outside of the gradients is complete."""
        sums, sum_bytes = self.position.sums + 1, result.nbytes
        self.position = replace(self.position, sums=sums, sum_bytes=sum_bytes)
        self._last_sum = result.reshape(-1).view(torch.uint8)

    def last_sum(self, like: torch.Tensor) -> torch.Tensor:
        """The result of the last sum, in the type and shape of a tensor."""
        return self._last_sum.clone().view(like.dtype).view(like.shape)

    def roll_back(self) -> None:
        """Return to where the step at hand began."""
        self.position = self._position_before
        self._rollback.restore()

    def forget(self) -> None:
        """Whatever this worker has will be out of date."""
        self.position = Position()

    def run(self, group: Group, resume: str) -> bool:
        """Compare positions and hand over state; all ranks of a new group call it.

        Returns whether anyone had a state. `resume` is the newest checkpoint that the coordinator
        knows of, for when nobody has.
        """
        job, step, state = self._job, self._job.step, self._state
        has_state = self.position.has_state and not state.torn
        own = replace(self.position, has_state=has_state)
        failpoint("compare")
        newest = compare_positions(group, own, has_gradients=step.num_unused > 0)
        if not newest.position.has_state:
            self._start_anew(group.rank, resume)
        behind = [rank for rank in range(group.world) if rank not in newest.sources]
        state.plain = job.plain_state()
        failpoint("handover")
        hand_over(group, newest.sources, behind, state, grads=newest.has_gradients)
        if group.rank in behind:
            if not newest.has_gradients:
                self._rollback.drop_gradients()
            job.load_plain_state(state.plain)
            step.adopt()
            self._preallocation.filled()
        self._last_sum = newest.share_last_sum(group, self._last_sum)
        steps = max(newest.position.steps, step.num_done)
        self.position = replace(newest.position, has_state=True, steps=steps)
        return newest.position.has_state

    def _start_anew(self, rank: int, resume: str) -> None:
        """Nobody has a state: the leader's fresh one, or that of a checkpoint, is handed out."""
        self._preallocation.discard()
        if rank != 0:
            return
        self._saver.load(resume)
        if self._state.torn:
            raise EvenstepError(
                "all workers that trained were lost while they handed their state to this one, "
                "which has only a part of it, and there is no checkpoint. Start the run again; a "
                "smaller --checkpoint-every writes checkpoints more often."
            )
