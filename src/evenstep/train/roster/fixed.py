"""A fixed roster: one process alone, or the ranks of torchrun. A rank that fails ends the run."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from evenstep.config import Settings
from evenstep.decide.learning_rate import global_batch
from evenstep.engine import Engine
from evenstep.errors import ConfigError, EvenstepError
from evenstep.journal import Journal
from evenstep.launch.ranks import StaticRank
from evenstep.messages import ALIKE, differ
from evenstep.observe.feed import SinkFeed
from evenstep.strict import build
from evenstep.train.comm.address import reachable_address
from evenstep.train.comm.forks import never_freed_in_forks
from evenstep.train.comm.group import CPU, Group, GroupGoneError, WorkerLostError
from evenstep.train.comm.model_check import check_models
from evenstep.train.comm.shared_store import SharedStore
from evenstep.train.comm.transfer import await_closed
from evenstep.train.job import Job
from evenstep.train.plan.figures import LocalFigures
from evenstep.train.plan.local import LocalPlanner
from evenstep.train.plan.plans import RankPlan
from evenstep.train.ports import NoPlanner, Observer, Planner
from evenstep.train.recover.flatten import bytes_of
from evenstep.train.recover.slices import TensorSpec
from evenstep.train.recover.state import TrainingState
from evenstep.train.roster.worker_info import run_settings, worker_facts
from evenstep.types import Worker

log = logging.getLogger("evenstep")

TIMEOUT_S = 600.0
CHECK_S = 0.25  # between two questions to the store for failed ranks: rank 0 has to answer each
CLOSE_S = 15.0  # for process groups to be destroyed; on a busy host even milliseconds take long


class FixedRoster:
    """One generation for the whole run."""

    hands_over_state = False
    is_late = is_ending = False
    left = None
    generation, num_pending = 1, 0
    current = None

    def __init__(
        self,
        place: StaticRank,
        job: Job,
        *,
        journal: Path | None = None,
        sinks: SinkFeed | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._sinks = sinks or SinkFeed()
        self.rank, self.world = place.rank, place.world
        self._job, self._journal, self._observer = job, journal, observer
        self._waits_for_all = place.hosts_store  # at the end
        self._store = store = HashStore() if place.world == 1 else _connect(place)
        self._shared = SharedStore(store, place.rank, place.world, TIMEOUT_S)
        self._planner: Planner = NoPlanner()
        self._address = ""
        self._groups: list[Group] = []
        try:
            if place.world > 1:
                self._address = reachable_address(self._shared, place.address, place.port)
            if place.world > 1 and not place.rank:
                text = "the store's port %d on all interfaces and Gloo's, one a rank, on %s: open "
                text += "to anyone who reaches them; not encrypted"
                log.info(text, place.port, self._address)
            self.control = self._make_group("control", CPU)
        except BaseException as e:  # there is no session yet that would tell the others
            self._shared.publish_failure(e)
            raise

    def present(self, shares: tuple[int, ...]) -> tuple[int, ...]:
        return shares

    def prepared(self) -> None:
        """Check that all ranks have the same model, and broadcast the leader's tensors."""
        model = self._job.model
        check_models(self._shared, model.module)
        state = TrainingState({"model": model.module}, {}, {})
        for tensor in state.collect()["models"]["model"].values():
            self._broadcast(tensor)
        self._job.connect(self.control, self._make_group, on_wait=model.meter.waited)

    @torch.no_grad()
    def _broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast the leader's tensor, as bytes: Gloo does not support all dtypes."""
        if self.world == 1 or not tensor.numel():
            return
        dims = TensorSpec.of(tensor).dims
        dense = tensor.resolve_conj().resolve_neg().permute(dims).contiguous()
        self.control.broadcast(bytes_of(dense))
        if dense.data_ptr() != tensor.data_ptr():
            tensor.permute(dims).copy_(dense)

    def start(self) -> Planner:
        """The leader learns of all workers and publishes the first plan."""
        job, shared = self._job, self._shared
        facts = worker_facts(job)
        shared.publish("facts", facts)
        everyone = shared.read_all("facts")
        for rank, other in enumerate(everyone):
            for name in ALIKE:
                if other.get(name) != facts.get(name):  # models have been compared before
                    mine, theirs = (f"on rank {r}" for r in (self.rank, rank))
                    raise ConfigError(name, differ(name, facts[name], mine, other[name], theirs))
        if self._observer is not None:
            batch = global_batch(job.loader.batch, self.world)
            job.plans.restart(self._observer.plans(batch, self.world))
            return self._planner
        if self.rank == 0:
            width = len(str(self.world - 1))
            workers = [
                Worker(id=f"w{r:0{width}}", kind=f["kind"], cores=f["cores"], cap=f["cap"])
                for r, f in enumerate(everyone)
            ]
            self._start_planner(workers)
        shares, lr_factor, rule, warmup_steps = shared.read("first", 0)
        first = RankPlan(from_step=0, shares=tuple(shares), lr_factor=lr_factor)
        job.plans.restart([first])
        job.plans.warmup_steps = warmup_steps
        job.lr_scale.set_target(0, lr_factor, warmup_steps if lr_factor != 1.0 else 0)
        job.step.measures_noise = rule == "adascale"
        return self._planner

    def _start_planner(self, workers: list[Worker]) -> None:
        """Plan for these workers, and publish the first plan."""
        settings = build(Settings, {"workers": {"min": self.world}, **run_settings(self._job)})
        engine = Engine(settings)
        if self._journal is not None:
            engine.journal = Journal.create(self._journal, settings)
        job = self._job
        figures = LocalFigures(self._sinks, job.loader.order.length or 0, lambda: job.num_epochs)
        self._planner = planner = LocalPlanner(engine, workers, figures=figures)
        first, batch = planner.next(0), settings.batch
        if first is None:
            raise EvenstepError(planner.paused)
        terms = [first.shares, first.lr_factor, batch.lr_rule, batch.lr_warmup_steps]
        self._shared.publish("first", terms)

    def enter(self) -> None:
        """Nothing to do: a rank is in from the start."""

    def settle(self, *, in_loop: bool) -> int:
        """The roster never changes."""
        if not self._job.has_model:
            raise ConfigError("loader", "call session.prepare(model, ...) before the first batch")
        return self.generation

    def fall_behind(self) -> None:
        """Never called: without spares nobody falls behind."""

    def finish_epoch(self) -> None:
        """Nothing to do: all ranks take every step together."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        return self.control.sum(values)

    def lost(self, error: GroupGoneError) -> None:
        """End the run: a fixed roster cannot go on without a rank."""
        raise error

    def move_on(self, num: int) -> None:
        """There is one generation."""
        raise AssertionError("a fixed roster has one generation")

    def trained(self) -> None:
        """Nothing to do: a fixed roster keeps no checkpoints."""

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why the script failed."""
        self._shared.publish_failure(error)
        # Wait until all know why: torchrun ends with its first rank, and the store may go with it.
        self._waits_for_all = self._waits_for_all or not isinstance(error, WorkerLostError)

    def leave(self) -> None:
        """Stop planning; the rank that hosts the store waits for the others."""
        self._planner.close(self._job.step)
        self._shared.finish(wait_for_all=self._waits_for_all)

    def close(self) -> None:
        """Destroy the process groups, and close the sinks: the other ranks have been let go."""
        groups, self._groups = self._groups, []
        for group in groups:
            group.close()
        await_closed(CLOSE_S)
        self._sinks.close()

    def _make_group(self, name: str, device: torch.device) -> Group:
        group = Group(
            self._store,
            self.generation,
            self.rank,
            self.world,
            timeout_s=TIMEOUT_S,
            name=name,
            device=device,
            address=self._address,
            check=lambda _: self._shared.check_failure(),
            slice_s=CHECK_S,
        )
        self._groups.append(group)
        return group


def _connect(place: StaticRank) -> Store:
    store = TCPStore(place.address, place.port, None, place.hosts_store, wait_for_workers=False)
    return never_freed_in_forks(store)
