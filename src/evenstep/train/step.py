"""One step of a worker: its batch, the pulse, the sums; what loader and reducer call."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch

from evenstep.errors import ConfigError, EvenstepError
from evenstep.train.comm.group import (
    CPU,
    Group,
    GroupGoneError,
    card_of,
    ends_on_error,
    on_cards,
    surviving_errors,
)
from evenstep.train.data.loader import Loader
from evenstep.train.measure.lr_scale import Rate
from evenstep.train.measure.meter import Meter, Outlook
from evenstep.train.reduce import batch_norm as norm
from evenstep.train.reduce import pulse
from evenstep.train.reduce.loss_scale import LossScale, check_scales, stepping_scaler
from evenstep.train.reduce.pulse import RankPlan, Report
from evenstep.train.reduce.reducer import Reducer
from evenstep.verify.probe import Probe

log = logging.getLogger("evenstep")

FORGOTTEN = 200  # batches without any optimizer step, which is worth a word


class Stepping(ABC):
    """What a worker holds while it trains, and how it gets through a step with the others."""

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        cap: int | None,
        min_share: int,
        seed: int,
        kind: str,
    ) -> None:
        self._kind = kind
        self.rank, self.world = 0, 1
        self.generation = 0
        self.probe: Probe | None = None  # there only where `evenstep verify` runs the script
        self._settings, self._cap, self._min_share, self._seed = settings, cap, min_share, seed
        self._outlook = Outlook()
        self._meter = Meter(CPU)
        self._group: Group
        self._groups: list[Group] = []
        self._model: torch.nn.Module | None = None
        self._things: dict[str, Any] = {}  # with a state, by name
        self._releases: list[Callable[[], None]] = []  # give the script's objects back, at the end
        self._closed = False
        self._reducer: Reducer | None = None
        self._device = CPU
        self._sync_norms = False
        self._local_norms: torch.nn.Module | None = None
        self._warned_local_norms = False
        self._loader: Loader | None = None
        self._plans: list[RankPlan] = []
        self._rate = Rate()
        self._loss_scale = LossScale()
        self._measures = False  # the gradients' noise
        self._num_epochs = 0  # 0: the script has not said
        self._next_step = 0
        self._began_s = self._started_s = time.monotonic()
        self._report: tuple[int, float, float] = (0, 0.0, 1.0)  # samples, weight, total
        self._reports: list[Report] = []
        self._batches_since_step = 0  # whose gradients no optimizer has used yet
        self._has_optimizer = self._told_forgotten = False
        self._warmup_steps = 0  # in which the learning rate's first factor is reached
        self._in_hand = False  # a batch of the loader
        self._left_s: float | None = None  # when a loop was left with its last batch in hand
        self._adopted = False  # the step at hand was done by others, and the state is theirs
        self.void = False  # the step at hand does not count: a worker was lost, it is repeated

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0: the one to print and save."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """Steps taken by the whole cluster."""
        return self._next_step + self.is_left_behind

    def check_open(self, what: str) -> None:
        """Raise if the session is closed: this call needs all workers."""
        if self._closed:
            raise EvenstepError(
                f"{what} was used after the session was closed: the other workers do not take part "
                "any more. Use it inside of `with evenstep.join() as session`."
            )

    # What the loader and the reducer call, in the order in which a step meets them.

    def shares_at(self, step: int) -> tuple[int, ...]:
        """The shares by rank that are valid at a step."""
        at = bisect_right(self._plans, step, key=lambda plan: plan.from_step)
        return self._plans[at - 1].shares

    def begin_fetch(self) -> None:
        """A batch is about to be taken: the step's time begins here."""
        self._began_s = time.monotonic()

    def begin_step(self, step: int, *, samples: int, weight: float, total: int) -> None:
        """A batch is in hand."""
        if self._reducer is None:
            raise ConfigError("loader", "call session.prepare(model, ...) before the first batch")
        self._report = (samples, weight, float(total))
        self._reducer.weight = weight / total
        self._reducer.measures = self._measures
        self._rate.begin_step(step)
        self._reports, self._in_hand, self._left_s = [], True, None
        self._meter.begin()

    def _fill_pulse(self, used: list[bool]) -> torch.Tensor:
        if not self._in_hand:
            raise EvenstepError(
                "a backward pass outside of a loop over session.loader(...), on samples that "
                "nobody shares out. Take training batches from session.loader alone."
            )
        self._meter.ready()
        plan, switch = self._orders()
        samples, weight, _ = self._report
        report = Report(
            samples=samples,
            compute_s=self._meter.compute_s(samples),
            wait_s=self._meter.wait_s,
            free_cpu=self._outlook.free_cpu,
            free_memory=self._outlook.free_memory,
            weight=weight,
            grad_squared_norm=self._squared_norm(own=True),
            loss_scale=self._loss_scale.of_step(),
        )
        return pulse.fill(self._next_step, self.world, self.rank, report, plan, used, switch)

    def _read_pulse(self, summed: torch.Tensor) -> tuple[float, list[bool]]:
        """All reports and the leader's plan; what makes the weights add up to one; who is used."""
        self._meter.reduced()
        if not self._reports or not self._batches_since_step:  # not once more for another pass
            self._batches_since_step += 1
        self._reports, plan, switch, used = pulse.read(summed, self._next_step, self.world)
        check_scales(self._reports)
        if plan is not None:
            self._plans.append(plan)
            # It came in single precision: the same factor must not cut a warm-up short.
            if not math.isclose(plan.lr_factor, self._rate.target, rel_tol=1e-5):
                left = self._rate.steps_left(plan.from_step)  # of a warm-up that goes on
                if self._rate.target == 1.0:
                    left = self._warmup_steps  # it begins only now, where noise was to be measured
                self._rate.aim(plan.from_step, plan.lr_factor, left)
        if switch:
            self._switch(switch)
        total = sum(r.weight for r in self._reports)
        return self._report[2] / total if total > 0 else 0.0, used

    @property
    def is_done(self) -> bool:
        """Whether the batch in hand has made a step that counts."""
        return not self.void and (bool(self._reports) or self._adopted)

    @property
    def is_left_behind(self) -> bool:
        """Whether a loop was left after a step that has not been ended yet."""
        return self._left_s is not None and self.is_done

    def left(self) -> None:
        """The loop over the loader is closed, by `break` or by an error, with a batch in hand."""
        self._left_s = time.monotonic()

    def let_go_of_batch(self) -> None:
        """No batch is in hand any more, whatever became of it."""
        self._in_hand, self._left_s = False, None

    def end_step(self, step: int) -> None:
        """The loop asks for the next batch, or was left: the step is done."""
        if not self._reports:
            raise EvenstepError(
                f"step {step} had no backward pass: every batch needs one on every rank"
            )
        self._next_step, self._in_hand = step + 1, False
        if self._batches_since_step > FORGOTTEN and not self._told_forgotten:
            self._tell_forgotten()
        ended_s = time.monotonic() if self._left_s is None else self._left_s
        self._tell_step(step, ended_s - self._began_s)
        if self.probe is not None:
            self.probe.end_step()

    def end_epoch(self) -> None:
        """The loader is through: running statistics kept by each worker become one."""
        if self._local_norms is not None and self.world > 1:
            share = float(self.shares_at(self._next_step - 1)[self.rank])
            norm.average_buffers(self._local_norms, self._sum, share)

    def _waited(self, seconds: float) -> None:
        """On peers, in the midst of a step."""
        self._meter.waited(seconds)

    def _squared_norm(self, *, own: bool = False) -> float:
        """Of this worker's own mean gradient, or of the whole; 0 if it is not known."""
        if self._reducer is None or not self._measures:
            return 0.0
        norm = self._reducer.own_squared_norm if own else self._reducer.squared_norm
        return norm if math.isfinite(norm) else 0.0

    def _check_reduced(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        assert self._reducer is not None
        assert self._model is not None
        self._reducer.check_known(optimizer, self._model)

    def _check_scaler(self, *_: Any) -> None:
        scaler = stepping_scaler()
        if scaler is not None and not self._loss_scale.knows(scaler):
            self._find_scaler(scaler)

    def _find_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """The script uses a GradScaler that the session was not given."""
        self._loss_scale.add(scaler)

    def _on_optimizer_step(self, *_: Any) -> None:
        self._batches_since_step = 0

    def _tell_forgotten(self) -> None:
        """Gradients pile up: for the good, or because a line is missing."""
        if not self._has_optimizer:
            raise EvenstepError(
                f"session.prepare was given no optimizer, and {FORGOTTEN} batches have passed. "
                "Pass it to prepare along with the model, and call optimizer.step()."
            )
        self._told_forgotten = True
        if self.is_leader:
            log.warning(
                "no optimizer given to session.prepare has taken a step in %d batches. If that is "
                "not to accumulate gradients, pass the optimizer to prepare, and call "
                "optimizer.step().",
                FORGOTTEN,
            )

    def _plan_from(self) -> int:
        """The first step that nobody has prefetched yet."""
        return self._next_step + 1 + (self._loader.prefetched if self._loader else 0)

    def _join_groups(self, make: Any, *, on_gone: Any = None) -> None:
        """Meet the other ranks of a generation: `make(name, device)` gives a group."""
        assert self._reducer is not None
        assert self._model is not None
        elastic = on_gone is not None  # it can go on when a group is gone
        cuda = self._group.world > 1 and self._all_on_cuda(elastic)
        device = self._device if cuda else CPU

        def join(name: str) -> Group:
            with surviving_errors(elastic and cuda):
                group: Group = make(name, device)
            group.sees_through = elastic or not ends_on_error()  # else nobody looks for errors
            return group

        gradients = join("gradients") if cuda else self._group
        self._reducer.regroup(gradients, self._group, pulse.size(self.world))
        self._loss_scale.begin_roster()
        if self._sync_norms:
            # A group of its own: a layer's sums and the buckets' may start in another order.
            norm.synchronise(
                self._model,
                join("norm"),
                lambda: self._report[1],
                self._waited,
                on_gone,
                lambda: self.void,
            )
        self._warn_of_local_norms()

    def _warn_of_local_norms(self) -> None:
        """Warn once, when a second worker appears, that BatchNorm uses each worker's own share."""
        if self._local_norms is None or self.world == 1 or self._warned_local_norms:
            return
        self._warned_local_norms = True  # on all ranks: a later leader does not repeat it
        if self.is_leader:
            log.warning("%s", norm.notice(norm.find(self._local_norms)))

    def _all_on_cuda(self, elastic: bool) -> bool:
        """Gradients are reduced where they are if NCCL can do it; others meet on the host."""
        return on_cards(self._group, card_of(self._device), elastic=elastic)

    # What differs between a fixed roster and one that changes.

    @abstractmethod
    def enter(self) -> None:
        """Be part of a generation from here on."""

    @abstractmethod
    def settle(self, *, may_rest: bool) -> int:
        """Before each batch: whatever changes the roster happens here. The generation then.

        `may_rest`: whether this worker's loop can follow the others into another epoch from here.
        """

    @abstractmethod
    def fall_behind(self) -> None:
        """The loop has met a state of a later epoch than its own, and ends."""

    @abstractmethod
    def _orders(self) -> tuple[RankPlan | None, int]:
        """What the leader passes on: a plan, and by how many generations to go on."""

    @abstractmethod
    def _switch(self, ahead: int) -> None:
        """The leader has passed on a new generation, for the end of this step."""

    @abstractmethod
    def _gone(self, error: GroupGoneError) -> None:
        """The group is gone in the midst of a step."""

    @abstractmethod
    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all workers of a tensor that is ours to change."""

    @abstractmethod
    def _tell_step(self, step: int, seconds: float) -> None:
        """The step's reports to the brain."""
