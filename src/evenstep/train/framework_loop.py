"""What adapters need of a session: a framework owns their loop, and counts in it."""

from __future__ import annotations

from evenstep.train.between_steps import BetweenSteps
from evenstep.train.job import Job
from evenstep.train.ports import Roster


class FrameworkLoop:
    """`session.framework`: enter and finish a loop that a framework owns, and sum its counts."""

    def __init__(self, job: Job, roster: Roster, between: BetweenSteps) -> None:
        self._job, self._roster, self._between = job, roster, between

    def owns(self, name: str) -> None:
        """A registered object is the framework's own.

        It need not change in the same batches on all workers, nor by the session's numbers.
        """
        self._job.updates.of_framework.add(name)

    def enter(self) -> None:
        """Join the others now, and take over the run's state, instead of with the first batch."""
        self._between.check_open("session.framework.enter")
        self._roster.enter()

    def finish(self) -> None:
        """Training is over, on all workers: write the last checkpoint.

        `session.epochs` does so at its end. Other loops call this before they load other weights
        into the model, such as the best checkpoint.
        """
        self._between.sum(0.0)  # a barrier: all workers have the last step
        self._job.loader.end_loop()
        self._roster.trained()

    def count_with(self, line: str) -> None:
        """The line of this framework's loops that counts batches right, for error messages."""
        self._job.updates.windows.way_out = line

    @property
    def counts_are_right(self) -> bool:
        """Whether the script takes its counts from the session, which repeats no number."""
        windows = self._job.updates.windows
        return not self._roster.hands_over_state or windows.is_counted or windows.is_trusted

    def begin_evaluation(self) -> None:
        """Be in a generation, with running statistics averaged over workers."""
        self._between.begin_evaluation()

    def part_of(self, length: int) -> tuple[int, int]:
        """The begin and end of this worker's part of so many samples, by the present shares."""
        return self._between.part_of(length)

    @property
    def is_late(self) -> bool:
        """Whether this worker's loop is in an epoch that is over: it computes for itself alone."""
        return self._roster.is_late

    @property
    def left(self) -> SystemExit | None:
        """What has ended the script, if this worker left the run before the end of training."""
        return self._roster.left

    @property
    def weight(self) -> float:
        """What this worker's mean loss of the batch at hand counts for: its samples, or tokens."""
        return self._job.step.batch.weight

    @property
    def share(self) -> float:
        """This worker's part of the batch at hand, by samples: what its mean gradient counts."""
        batch = self._job.step.batch
        return batch.samples / batch.total

    def count(self, items: float, loss: float) -> None:
        """Before `backward`: what this worker's share has of items, such as tokens, and of loss.

        Both are added up over all workers along with the gradients; `counts` has the sums.
        """
        self._job.step.own_counts = items, loss

    @property
    def counts(self) -> tuple[float, float] | None:
        """Items and loss of the batch at hand over all workers, once its gradients are reduced.

        None on a worker that took over the state of others instead of reducing them.
        """
        reports = self._job.step.reports
        return (sum(r.items for r in reports), sum(r.loss for r in reports)) if reports else None
