"""At the start of a generation: bring workers that are behind to the newest state.

When a worker dies during an all-reduce, some of the others may have its result and some not. So a
new generation first compares positions: the highest reduced step wins, and ranks that have it send
their state to the others. The same holds for each sum between steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
from msgspec.structs import astuple

from evenstep.errors import EvenstepError
from evenstep.train.comm.group import Group
from evenstep.train.failpoint import failpoint
from evenstep.train.job import Job
from evenstep.train.recover.handover import hand_over
from evenstep.train.recover.preallocate import Preallocation
from evenstep.train.recover.rollback import Rollback
from evenstep.train.recover.state import TrainingState
from evenstep.train.roster.checkpointing import CheckpointSaver
from evenstep.train.roster.sit_out import announce_batch, announce_sum, sit_out


class Position(msgspec.Struct, frozen=True):
    """Steps whose gradients this worker has reduced, and other sums that it has completed."""

    has_state: bool = False  # of the run
    steps: int = 0
    reduced_in: int = 0  # the generation that reduced the last of them
    sums: int = 0
    sum_bytes: int = 0  # size of the last sum's result


class Situation(NamedTuple):
    """Where in the script this worker is."""

    has_gradients: bool = False  # that an optimizer may not have used yet
    between_steps: bool = True  # it fetches a batch next; else it may wait for a sum
    is_void: bool = False  # the step at hand, and with it the sums that it still takes


BETWEEN_STEPS = Situation()
FIELDS = len(Position.__struct_fields__) + len(Situation._fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestState:
    """Which ranks of a group have the newest state, and its position."""

    position: Position  # of the sources; without `has_state`: no rank has one
    sources: tuple[int, ...]
    missing_sum: tuple[int, ...]  # sources that lack the result of the last sum
    has_gradients: bool  # some optimizer may not have used them yet: they are part of the state
    waiting: tuple[int, ...]  # sources that wait for a sum, in the middle of a step or after it
    newcomers: tuple[int, ...]  # ranks without any state of the run

    def share_last_sum(self, group: Group, result: torch.Tensor) -> torch.Tensor:
        """Send the last sum to ranks that lack it; `result` is what this rank has, as bytes."""
        if not self.missing_sum:
            return result
        root = next(rank for rank in self.sources if rank not in self.missing_sum)
        if group.rank != root:
            result = torch.zeros(self.position.sum_bytes, dtype=torch.uint8)
        group.broadcast(result, root=root)
        return result


def compare_positions(
    group: Group, own: Position, situation: Situation = BETWEEN_STEPS
) -> NewestState:
    """Find the ranks with the newest state. All ranks of the group call this."""
    table = torch.zeros(group.world, FIELDS, dtype=torch.float64)
    table[group.rank] = torch.tensor((*astuple(own), *situation), dtype=torch.float64)
    rows = [tuple(map(int, row)) for row in group.sum(table).tolist()]
    num = len(Position.__struct_fields__)
    positions = [Position(bool(row[0]), *row[1:num]) if row[0] else Position() for row in rows]
    situations = [Situation(*map(bool, row[num:])) for row in rows]
    # If two generations reduced a step, the later one's result wins: a joiner whose join failed may
    # have the same step, rounded differently. If no rank has a state, all take the leader's
    # fresh one.
    ages = [(p.steps, p.reduced_in) if p.has_state else (-1, -1) for p in positions]
    newest = max(ages)
    sources = tuple(r for r, age in enumerate(ages) if age == newest and newest[0] >= 0) or (0,)
    position = max((positions[rank] for rank in sources), key=lambda p: p.sums)
    missing_sum = tuple(rank for rank in sources if positions[rank].sums < position.sums)
    amid = [s for s in sources if not (situations[s].between_steps or situations[s].is_void)]
    return NewestState(
        position=position,
        sources=sources,
        missing_sum=missing_sum,
        has_gradients=any(situations[rank].has_gradients for rank in sources),
        waiting=tuple(rank for rank in amid if rank not in missing_sum),
        newcomers=tuple(r for r, p in enumerate(positions) if position.has_state > p.has_state),
    )


class CatchUp:
    """Knows whether this worker has the run's state, and keeps the last sum for others."""

    def __init__(
        self, job: Job, state: TrainingState, rollback: Rollback, saver: CheckpointSaver
    ) -> None:
        self._job, self._state, self._rollback = job, state, rollback
        self._saver, self._preallocation = saver, Preallocation()
        self._has_state = False
        self.sitting_out: tuple[int, ...] = ()  # until the next batch, for which `admit` is called
        self._root = 0  # announces sums to those
        self._last_sum = torch.zeros(0, dtype=torch.uint8)  # its bytes

    def preallocate(self) -> None:
        """Allocate memory for the state that the others will hand over, while they train."""
        self._preallocation.make(self._job.stateful.values())

    def sum(self, group: Group, values: torch.Tensor) -> None:
        """A sum outside of the gradients, in place, also with ranks that sit it out."""
        if self.sitting_out:
            announce_sum(group, self._root, values)
        group.sum(values)

    def summed(self, result: torch.Tensor) -> None:
        """A sum outside of the gradients is complete."""
        self._job.step.num_sums += 1
        self._last_sum = result.reshape(-1).view(torch.uint8)

    def last_sum(self, like: torch.Tensor) -> torch.Tensor:
        """The result of the last sum, in the type and shape of a tensor."""
        return self._last_sum.clone().view(like.dtype).view(like.shape)

    def forget(self) -> None:
        """This worker's state will be out of date."""
        self._has_state, self._job.step.num_sums = False, 0

    def admit(self, group: Group) -> None:
        """The next batch comes: hand over the state to ranks that have sat out the last one."""
        announce_batch(group, self._root)
        self.run(group, "")

    def run(self, group: Group, resume: str, *, between_steps: bool = True) -> bool:
        """Compare positions and hand over state; all ranks of a new group call it.

        Returns whether anyone had a state. `resume` is the newest checkpoint that the coordinator
        knows of, for when no rank has one.
        """
        job, step, state = self._job, self._job.step, self._state
        own = Position(
            has_state=self._has_state and not state.torn,
            steps=step.num_reduced,
            reduced_in=step.reduced_in,
            sums=step.num_sums,
            sum_bytes=len(self._last_sum),
        )
        failpoint("compare")
        # In the middle of a step one of several optimizers may have stepped, and others have not.
        is_amid = step.has_batch and step.is_done and not between_steps
        situation = Situation(step.num_unused > 0 or is_amid, between_steps, step.is_void)
        newest = compare_positions(group, own, situation)
        if not newest.position.has_state:
            self._start_anew(group.rank, resume)
        sitting_out = newest.newcomers if newest.waiting else ()
        if group.rank in sitting_out:
            newest.share_last_sum(group, self._last_sum)
            sit_out(group, newest.waiting[0])
            return self.run(group, resume)
        if sitting_out:
            self._root = newest.waiting[0]
        self.sitting_out = sitting_out
        known = {*newest.sources, *sitting_out}
        behind = [rank for rank in range(group.world) if rank not in known]
        failpoint("handover")
        if behind:
            state.plain = job.plain_state()
            hand_over(group, newest.sources, behind, state, grads=newest.has_gradients)
        if group.rank in behind:
            if not newest.has_gradients:
                self._rollback.drop_gradients()
            job.load_plain_state(state.plain)
            step.adopt()
            self._preallocation.filled()
        self._last_sum = newest.share_last_sum(group, self._last_sum)
        step.num_reduced = max(newest.position.steps, step.num_taken)
        step.num_sums, self._has_state = newest.position.sums, True
        step.reduced_in = newest.position.reduced_in
        return newest.position.has_state

    def _start_anew(self, rank: int, resume: str) -> None:
        """No rank has a state: start from the leader's fresh one, or from a checkpoint."""
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
