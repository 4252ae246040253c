"""The session: what a training process holds while it is part of a run."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from evenstep.config import BatchSettings
from evenstep.decide.learning import global_batch
from evenstep.errors import ConfigError, EvenstepError
from evenstep.train import norm, pulse
from evenstep.train.evaluation import PartSampler
from evenstep.train.facts import facts_of, settings_of
from evenstep.train.group import CPU, Group, GroupGoneError, await_closed, card_of, on_cards
from evenstep.train.loader import Loader, Weight, check_dataset
from evenstep.train.meter import Meter, Outlook
from evenstep.train.order import cut
from evenstep.train.probe import Finished, Probe
from evenstep.train.pulse import RankPlan, Report
from evenstep.train.rate import Rate
from evenstep.train.reduce import Reducer

log = logging.getLogger("evenstep")

FORGOTTEN = 200  # batches without any optimizer step, which is worth a word


class Session(ABC):
    """A worker's part in a run. Use it as a context: `with evenstep.join() as session`."""

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
        self._reducer: Reducer | None = None
        self._device = CPU
        self._sync_norms = False
        self._local_norms: torch.nn.Module | None = None
        self._loader: Loader | None = None
        self._plans: list[RankPlan] = []
        self._rate = Rate()
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and self._loader is not None:
                self._loader.leave()
            self._left_s = None  # or by that error: how far the step came nobody knows
            # A loop in a generator that is closed has not failed: nobody asks it to go on.
            if error is not None and not isinstance(error, Finished | GeneratorExit):
                self._fail(error)
        finally:
            self.close()

    def close(self) -> None:
        """End this worker's part. The model stays as it is."""
        self._outlook.close()
        if self._reducer is not None:
            self._reducer.close()
        self._part()
        for group in self._groups:
            group.close()
        self._groups = []
        await_closed()

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0: the one to print and save."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """Steps taken by the whole cluster."""
        return self._next_step + self.is_left_behind

    @property
    def batch(self) -> int:
        """The global batch of the coming step."""
        if self._plans:
            return sum(self.shares_at(self.step))
        return global_batch(self._loader.batch, self.world) if self._loader else 0

    @property
    def samples(self) -> int:
        """Samples that the run has walked through: what a schedule counts in if the batch grows.

        Those that `drop_last` leaves out of an epoch count with it.
        """
        loader = self._loader
        return loader.epoch * loader.order.length + loader.reached if loader else 0

    @property
    def counted(self) -> int:
        """Samples of the batch at hand that count: 0 where it is only a stand-in."""
        return self._report[0]

    def prepare(self, model: torch.nn.Module, *others: Any, sync_batchnorm: bool = False) -> Any:
        """The model and what goes with it, ready for training on all workers.

        Parameters and buffers become the leader's. Gradients are the share-weighted mean over all
        workers when `backward` returns. Objects come back as they were given. `sync_batchnorm`
        gives batch normalisation the statistics of the whole batch instead of each worker's own.
        """
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise ConfigError("model", "is wrapped in DDP already; give the plain module")
        if self._model is not None:
            raise ConfigError(
                "prepare", "was called before; put several models into one torch.nn.ModuleList"
            )
        params = [p for p in model.parameters() if p.requires_grad]
        if not params:
            raise ConfigError("model", "has no trainable parameters: there is nothing to train")
        self._model, self._device = model, params[0].device
        self._meter = Meter(self._device)
        self._reducer = Reducer(
            params,
            on_ready=self._fill_pulse,
            on_reduced=self._read_pulse,
            on_gone=self._gone,
        )
        names = norm.find(model)
        self._sync_norms = bool(names) and sync_batchnorm
        if names and not sync_batchnorm:
            self._local_norms = model
        if self.probe is not None:
            self.probe.watch_model(model, self._reducer)
        for i, other in enumerate(others):
            if isinstance(other, torch.optim.Optimizer):
                self._has_optimizer = True
                other.register_step_pre_hook(self._check_reduced)
                other.register_step_pre_hook(self._before_optimizer_step)  # with the user's rate
                self._rate.attach(other)
                other.register_step_post_hook(self._on_optimizer_step)
            if hasattr(other, "state_dict"):
                self._things[f"{type(other).__name__}-{i}"] = other
        self._meet(model)
        if names and not sync_batchnorm and self.is_leader and self.world > 1:
            log.warning("%s", norm.notice(names))
        return (model, *others) if others else model

    def loader(
        self,
        dataset: Any,
        *,
        batch: int = 0,
        per_worker: int = 0,
        limit: int = 0,
        weight: Weight | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        **options: Any,
    ) -> Loader:
        """Batches of this worker's share of the global batch; each sample once an epoch.

        The global batch is `batch`, whoever trains; or it grows with the workers, `per_worker` for
        each up to `limit`, and the learning rate with it, by the setting `batch.lr_rule`.
        `weight` gives what a batch's mean loss counts for, where that is not its samples: the
        number of tokens or pixels, say. Further options are those of `DataLoader`.
        """
        if self._loader is not None:
            raise ConfigError("loader", "a session has one; use session.evaluation for others")
        if batch < 1 and not per_worker:
            raise ConfigError("batch", f"must be 1 or more, got {batch}")
        loader = Loader(
            self,
            dataset,
            batch=BatchSettings(size=batch, per_worker=per_worker, limit=limit),
            weight=weight,
            seed=self._seed,
            shuffle=shuffle,
            drop_last=drop_last,
            **options,
        )
        self._agree(loader)
        self._loader = loader
        return loader

    def epochs(self, num: int) -> Iterator[int]:
        """Epoch numbers from where the run stands.

        With each of them an epoch begins: what a loop that was left has not used of the one before
        stays unused.
        """
        if self._loader is None:
            raise ConfigError("epochs", "call session.loader(...) first")
        self._num_epochs = num
        self.enter()
        epoch = self._loader.epoch
        while epoch < num:
            yield epoch
            self._leave_loop()
            self._loader.leave_epoch()
            epoch = max(epoch + 1, self._loader.epoch)  # a spare comes back in a later one

    def register(self, name: str, thing: Any) -> None:
        """Keep an object with `state_dict` along with the run."""
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise ConfigError(name, "has no state_dict and load_state_dict")
        if isinstance(thing, torch.optim.Optimizer):
            raise ConfigError(name, "is an optimizer: give it to session.prepare(model, ...)")
        if name in self._things:
            raise ConfigError(name, "is registered already; choose another name")
        self._things[name] = thing

    def sum(self, value: torch.Tensor | float) -> torch.Tensor:
        """The sum of a value over all workers. All must ask at the same point."""
        self.enter()
        self._leave_loop()
        tensor = torch.as_tensor(value).detach()
        mine = tensor.to("cpu", copy=True)  # from a card, this waits for its work
        begun_s = time.perf_counter()
        summed = self._sum(mine)
        self._waited(time.perf_counter() - begun_s)
        return summed.to(tensor.device)

    def evaluation(
        self, dataset: Any, *, batch_size: int, shuffle: bool = False, **options: Any
    ) -> DataLoader[Any]:
        """A loader over this worker's part of a dataset: over all workers each sample once.

        Parts follow the roster and its shares as they are when a loop over it begins, so that all
        finish together. Add up counts with `session.sum`.
        """
        check_dataset(dataset, 1, options)
        sampler = PartSampler(len(dataset), self._enter_evaluation, self._part_of, shuffle=shuffle)
        return DataLoader(dataset, batch_size=batch_size, sampler=sampler, **options)

    def _enter_evaluation(self) -> None:
        """Be part of a generation, with statistics that are one also where a loop was left."""
        self.enter()
        if self._leave_loop():
            Session.end_epoch(self)

    def _leave_loop(self) -> bool:
        """If the loop over the loader was left, end its last step, with all that may follow one."""
        if self._left_s is None or self._loader is None:
            return False
        was_step = self.void or self.is_done
        self._loader.leave()
        if was_step:
            self.settle()
        return True

    def _part_of(self, length: int) -> tuple[int, int]:
        """From where to where this worker's part of a dataset goes."""
        last = self._plans[-1].shares if self._plans else (1,) * self.world
        return cut(length, last)[self.rank]

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
        )
        return pulse.fill(self._next_step, self.world, self.rank, report, plan, used, switch)

    def _read_pulse(self, summed: torch.Tensor) -> tuple[float, list[bool]]:
        """All reports and the leader's plan; what makes the weights add up to one; who is used."""
        self._meter.reduced()
        if not self._reports or not self._batches_since_step:  # not once more for another pass
            self._batches_since_step += 1
        self._reports, plan, switch, used = pulse.read(summed, self._next_step, self.world)
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
            group: Group = make(name, device)
            group.sees_through = elastic
            return group

        gradients = join("gradients") if cuda else self._group
        self._reducer.regroup(gradients, self._group, pulse.size(self.world))
        if self._sync_norms:
            # A group of its own: a layer's sums and the buckets' may start in another order.
            norm.synchronise(
                self._model,
                join("norm"),
                lambda: self._report[1],
                self._waited,
                on_gone,
            )

    def _all_on_cuda(self, elastic: bool) -> bool:
        """Gradients are reduced where they are if NCCL can do it; others meet on the host."""
        return on_cards(self._group, card_of(self._device), elastic=elastic)

    def _facts(self, loader: Loader) -> dict[str, Any]:
        return facts_of(loader, self._things, self._device, kind=self._kind, cap=self._cap)

    def _all_settings(self, loader: Loader) -> dict[str, Any]:
        epochs, least = self._num_epochs, self._min_share
        return settings_of(self._settings, loader, num_epochs=epochs, min_share=least)

    # What differs between a fixed roster and one that changes.

    @abstractmethod
    def enter(self) -> None:
        """Be part of a generation from here on."""

    @abstractmethod
    def settle(self) -> int:
        """Before each batch: whatever changes the roster happens here. The generation then."""

    @abstractmethod
    def _meet(self, model: torch.nn.Module) -> None:
        """A model was prepared."""

    @abstractmethod
    def _agree(self, loader: Loader) -> None:
        """A loader was made."""

    @abstractmethod
    def _orders(self) -> tuple[RankPlan | None, int]:
        """What the leader passes on: a plan, and by how many generations to go on."""

    @abstractmethod
    def _switch(self, ahead: int) -> None:
        """The leader has passed on a new generation, for the end of this step."""

    @abstractmethod
    def _before_optimizer_step(self, *_: Any) -> None:
        """An optimizer is about to step."""

    @abstractmethod
    def _gone(self, error: GroupGoneError) -> None:
        """The group is gone in the midst of a step."""

    @abstractmethod
    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all workers of a tensor that is ours to change."""

    @abstractmethod
    def _tell_step(self, step: int, seconds: float) -> None:
        """The step's reports to the brain."""

    @abstractmethod
    def _fail(self, error: BaseException) -> None:
        """The user's script raised."""

    @abstractmethod
    def _part(self) -> None:
        """Leave."""
