"""One batch on this worker, from fetching it until the loop asks for the next, as a state machine.

    COMMITTED -> FETCHED -> REDUCED -> COMMITTED
                    |          |
                    +-> VOID <-+                  a worker was lost: roll back and repeat the step
                          |
                          +-> ADOPTED -> COMMITTED   others had reduced it: take over their state
                          +-> OVERTAKEN -> COMMITTED   and they are ahead in the loop's body

Listeners (`on_fetched` and so on) take part in it; nothing is overridden.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

import msgspec

from evenstep.errors import EvenstepError
from evenstep.messages import Generation
from evenstep.types import StepReport, WorkerId

FORGOTTEN = 200  # batches without any optimizer step, after which something is likely wrong
MAX_BATCH = 2**24  # counts travel in single precision
EWMA_WEIGHT = 0.2  # of the newest step in the usual step time


class Phase(Enum):
    """How far the batch at hand is."""

    COMMITTED = "committed"  # no batch in hand; every step before `number` counts
    FETCHED = "fetched"  # a batch is in hand, its gradients are not reduced yet
    REDUCED = "reduced"  # its gradients are the mean over all workers
    VOID = "void"  # a worker was lost: the step does not count
    ADOPTED = "adopted"  # other workers completed the step, and this one took over their state
    OVERTAKEN = "overtaken"  # its state is from workers ahead: what the script does is discarded


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """This worker's share of one step."""

    step: int = 0
    samples: int = 0  # that count; 0 for a stand-in
    own: int = 0  # those of this process; all, unless the worker has several
    weight: float = 0.0  # of this worker's mean loss: its samples, or tokens
    part: float = 1.0  # of this process in that weight
    begin: int = 0  # where they are among those of all workers
    total: int = 1  # samples of all workers
    position: int = 0  # samples of the whole job before this step
    epoch: int = 0  # that its samples are of
    digest: int = 0  # of the data's order, to compare; 0: nothing to compare


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured in one step; its fields are in the order of the pulse."""

    samples: int
    compute_s: float
    wait_s: float
    free_cpu: float
    free_memory: float
    weight: float  # of this rank's mean loss: its samples, or tokens
    grad_squared_norm: float = 0.0  # of its own mean gradient; 0: not measured
    loss_scale: float = 0.0  # of its GradScalers; 1: none; 0: unknown
    num_updates: float = -1.0  # optimizer steps in the batch before; -1: it had no such batch
    num_scheduled: float = -1.0  # steps of schedulers in that batch
    registered: float = -1.0  # a bit for each registered object that changed in that batch
    data_digest: float = 0.0  # of the order in which it finds the data; equal on all ranks
    settings_digest: float = 0.0  # of its optimizers' learning rates and the like; equal, too
    items: float = 0.0  # that the script counted in its share, such as tokens
    loss: float = 0.0  # of all of them, added up by the script
    nonfinite: float = 0.0  # 1: its own gradient has an infinite value, or one that is no number
    epoch: float = 0.0  # that its samples are of; equal on all ranks

    @property
    def is_faulty(self) -> bool:
        """Whether its gradient is not finite, and no GradScaler will skip the step for that."""
        return self.nonfinite > 0 and self.loss_scale == 1.0

    def to_step_report(self, worker: WorkerId, compute_s: float, spread_s: float) -> StepReport:
        """The worker's report to the engine, with its mean compute time over similar steps."""
        return StepReport(
            worker=worker,
            samples=self.samples,
            compute_s=compute_s,
            wait_s=self.wait_s,
            free_cpu=self.free_cpu,
            free_memory=self.free_memory,
            grad_squared_norm=self.grad_squared_norm,
            spread_s=spread_s,
        )


class Step:
    """The step at hand. Listeners are called in the order in which they were added."""

    def __init__(self) -> None:
        self.number = 0  # the step at hand, or the next one
        self.num_reduced = 0  # steps whose gradients this worker has reduced
        self.reduced_in = 0  # the generation that reduced the last of them
        self.num_void = 0  # iterations of the script's loop that had to be repeated
        self.num_adopted = 0  # times that this worker took over the state of others
        self.num_sums = 0  # other sums over all workers that it has completed
        self.phase = Phase.COMMITTED
        self.has_batch = False
        self.stands = False  # the loop was told that the batch in hand counts
        self.is_between = False  # reduced, and the loop has not asked for the next batch yet
        self.batch = Batch()  # the last one fetched
        self.own_counts = 0.0, 0.0  # items of this worker's share, and their loss
        self.reports: list[Report] = []  # by rank, once its gradients are reduced
        self.reduced_by: Generation | None = None  # under a coordinator
        self.grad_squared_norm = 0.0  # of the reduced gradient; 0: not measured
        self.measures_noise = False  # squared norms of gradients, for adaptive learning rates
        self.num_unused = 0  # batches whose gradients no optimizer step has used yet
        self.num_passes = 0  # backward passes of the batch in hand
        self.idle_s = 0.0  # spent on roster changes instead of training, not reported yet
        self.seconds = self.usual_s = 0.0  # that the last committed step took, and an EWMA of it
        self.on_fetched: list[Callable[[], None]] = []
        self.on_reduced: list[Callable[[], None]] = []
        self.on_void: list[Callable[[], None]] = []
        self.on_done: list[Callable[[], None]] = []  # with a batch that counts, still in hand
        self.on_committed: list[Callable[[], None]] = []
        self.on_forgotten: list[Callable[[], None]] = []  # gradients pile up unused
        self._began_s = time.monotonic()
        self._left_s: float | None = None  # when the loop was left with a batch in hand

    @property
    def is_void(self) -> bool:
        """Whether the step at hand does not count and will be repeated."""
        return self.phase is Phase.VOID

    @property
    def is_done(self) -> bool:
        """Whether the batch in hand has made a step that counts."""
        return self.phase in (Phase.REDUCED, Phase.ADOPTED, Phase.OVERTAKEN)

    @property
    def is_discarded(self) -> bool:
        """Whether what the script does now is undone: optimizers and schedulers do not step."""
        return self.phase in (Phase.VOID, Phase.OVERTAKEN)

    @property
    def is_last_committed(self) -> bool:
        """Whether the last batch fetched made the last step that counts, reduced by this worker."""
        return bool(self.reports) and not self.has_batch and self.batch.step + 1 == self.number

    @property
    def num_taken(self) -> int:
        """Steps that count, including the batch in hand once its gradients are reduced."""
        return self.number + (self.has_batch and self.is_done and self.batch.step == self.number)

    @property
    def is_left(self) -> bool:
        """Whether the loop was left with a batch in hand, and the step has not been ended since."""
        return self._left_s is not None

    @property
    def stopped_s(self) -> float:
        """Between steps: when training stopped. A void step counts as lost time."""
        return self._began_s if self.is_void else time.monotonic()

    def fetched(self, batch: Batch, began_s: float) -> None:
        """Take a batch in hand, which the loop has asked for at `began_s`."""
        self.batch, self.reports, self._began_s = batch, [], began_s
        self.phase, self.has_batch, self._left_s = Phase.FETCHED, True, None
        self.stands = False
        self.num_passes = 0
        self.own_counts = 0.0, 0.0
        _notify(self.on_fetched)

    def reduced(self, reports: list[Report], by: Generation | None) -> None:
        """The all-reduce of a backward pass is complete, in a generation.

        A sum before the step's end may change the generation.
        """
        if not self.reports or not self.num_unused:  # a second pass of the same batch adds none
            self.num_unused += 1
        self.reports, self.reduced_by, self.is_between = reports, by, True
        self.num_reduced = self.number + 1
        self.reduced_in = by.number if by is not None else 0
        if self.phase is not Phase.ADOPTED:
            self.phase = Phase.REDUCED
        _notify(self.on_reduced)

    def void(self) -> None:
        """A worker was lost: whatever the loop does until the next batch will be rolled back."""
        self.phase = Phase.VOID
        _notify(self.on_void)

    def adopt(self) -> None:
        """This worker now has the state of workers that completed the step."""
        if self.is_void and not self.has_batch:
            self.num_void -= 1  # nothing is to be repeated
        self.num_adopted += 1
        self.phase = Phase.ADOPTED if self.has_batch else Phase.COMMITTED

    def overtake(self) -> None:
        """Others are ahead in the script: until it catches up, its work is discarded."""
        self.phase = Phase.OVERTAKEN

    def rejoin(self) -> None:
        """The script has caught up with the others."""
        if self.phase is Phase.OVERTAKEN:
            self.adopt()

    def retry(self) -> None:
        """The void step is rolled back: fetch its samples again."""
        self.phase = Phase.COMMITTED

    def end(self) -> None:
        """The loop is done with the batch: commit the step, unless it is void."""
        if self.phase is Phase.FETCHED:
            raise EvenstepError(
                f"step {self.batch.step} had no backward pass before the next batch was asked for. "
                "Every batch needs one on every rank; a loop that fetches ahead leaves that to the "
                "loader: session.loader(..., num_workers=2)"
            )
        ended_s = time.monotonic() if self._left_s is None else self._left_s
        reduced_here = self.phase is Phase.REDUCED
        if reduced_here:
            _notify(self.on_done)
        self.num_void += self.is_void
        if not self.is_void:
            self.number, self.phase = self.batch.step + 1, Phase.COMMITTED
            self.seconds = ended_s - self._began_s
        self.has_batch, self._left_s = False, None
        if reduced_here:
            usual_s = self.usual_s or self.seconds
            self.usual_s = usual_s + EWMA_WEIGHT * (self.seconds - usual_s)
            _notify(self.on_committed)
            if self.num_unused > FORGOTTEN:
                _notify(self.on_forgotten)

    def leave(self) -> None:
        """The loop over the loader was left, by `break` or by an error, with a batch in hand."""
        self._left_s = time.monotonic()

    def drop(self) -> None:
        """Give up the batch in hand: without a backward pass, its samples come again."""
        if self.phase is Phase.FETCHED:
            self.phase = Phase.COMMITTED
        self.has_batch, self._left_s = False, None

    def interrupt(self) -> None:
        """An error ended the loop: how far its last step got is unknown."""
        self._left_s = None


def _notify(listeners: list[Callable[[], None]]) -> None:
    for listener in tuple(listeners):  # a listener may remove itself
        listener()
