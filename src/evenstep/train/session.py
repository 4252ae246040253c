"""The session: what a training process holds while it is part of a run."""

from __future__ import annotations

import logging
import os
import platform
import time
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.utils.data import DataLoader, Subset

from evenstep.config import Settings
from evenstep.engine import Engine
from evenstep.errors import ConfigError, EvenstepError
from evenstep.journal import Journal
from evenstep.launch.environment import Place, find
from evenstep.strict import build, override
from evenstep.train import norm, pulse
from evenstep.train.agent import Agent
from evenstep.train.group import CPU, Group
from evenstep.train.loader import Loader, Weight, check_dataset
from evenstep.train.meeting import Meeting, check_models
from evenstep.train.meter import Meter, Outlook
from evenstep.train.order import cut
from evenstep.train.probe import Finished, Probe
from evenstep.train.pulse import RankPlan, Report
from evenstep.train.reduce import Reducer
from evenstep.types import Worker

log = logging.getLogger("evenstep")

TIMEOUT_S = 600.0
FORGOTTEN = 200  # batches without any optimizer step, after which the script is surely wrong


def join(
    *,
    policy: str | dict[str, Any] = "auto",
    cap: int | None = None,
    min_share: int = 1,
    seed: int = 0,
    journal: Path | None = None,
    **settings: Any,
) -> Session:
    """Take part in a run: alone, or as a rank under torchrun, found from the environment.

    `policy` and further `settings` are those of the config tree and count on the leader; so does
    the variable EVENSTEP_SET, as "policy=uniform;straggler.replace=true", which is put over them.
    `cap` is the largest share that fits this worker's memory.
    """
    place = find(os.environ)
    told = [part for part in os.environ.get("EVENSTEP_SET", "").split(";") if part]
    plain = override({"policy": policy, **settings}, told)
    return Session(place, plain, cap=cap, min_share=min_share, seed=seed, journal=journal)


class Session:
    """A worker's part in a run. Use it as a context: `with evenstep.join() as session`."""

    def __init__(
        self,
        place: Place,
        settings: dict[str, Any],
        *,
        cap: int | None,
        min_share: int,
        seed: int,
        journal: Path | None,
    ) -> None:
        self.rank, self.world = place.rank, place.world
        self.probe = Probe.find(os.environ, place.rank)  # None, unless `evenstep verify` runs this
        self._settings, self._cap, self._min_share = settings, cap, min_share
        self._seed, self._journal = seed, journal
        self._hosts_store = place.hosts_store
        self._store = store = HashStore() if place.world == 1 else _dial(place)
        self._meeting = Meeting(store, place.rank, place.world, TIMEOUT_S)
        self._groups: list[Group] = []
        self._group = self._new_group("control", CPU)
        self._outlook = Outlook()
        self._reducer: Reducer | None = None
        self._meter = Meter(CPU)
        self._agent: Agent | None = None
        self._loader: Loader | None = None
        self._plans: list[RankPlan] = []
        self._next_step = 0
        self._began_s = self._started_s = time.monotonic()
        self._report: tuple[int, float, float] = (0, 0.0, 1.0)  # samples, weight, total
        self._reports: list[Report] = []
        self._batches_since_step = 0
        self._in_hand = False  # a batch of the loader
        self._registered: dict[str, Any] = {}
        self._local_norms: torch.nn.Module | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, Finished):
            self._meeting.fail(error)
        self.close()

    def close(self) -> None:
        """End this worker's part. The model stays as it is."""
        self._outlook.close()
        if self._agent is not None:
            self._agent.close()
        if self._reducer is not None:
            self._reducer.close()
        self._meeting.part(host=self._hosts_store)
        for group in self._groups:
            group.close()

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0: the one to print and save."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """Steps taken by the whole cluster."""
        return self._next_step

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
        params = [p for p in model.parameters() if p.requires_grad]
        if not params:
            raise ConfigError("model", "has no trainable parameters: there is nothing to train")
        check_models(self._meeting, model)
        for tensor in (*model.parameters(), *model.buffers()):
            self._group.broadcast(tensor.data)
        device = params[0].device
        self._meter = Meter(device)
        # All on CUDA: reduced where they are. A mixed roster meets on the host.
        self._meeting.tell("device", device.type)
        cuda = all(kind == "cuda" for kind in self._meeting.hear_all("device"))
        group = self._new_group("gradients", device) if cuda else self._group
        names = norm.find(model)
        if names and sync_batchnorm:
            # A group of its own: a layer's sums and the buckets' may start in another order.
            norm.synchronise(
                model,
                self._new_group("norm", device if cuda else CPU),
                lambda: self._report[1],
                self._meter.waited,
            )
        elif names:
            self._local_norms = model
            if self.is_leader and self.world > 1:
                log.warning("%s", norm.notice(names))
        self._reducer = Reducer(
            params,
            group,
            self._group,
            pulse=pulse.size(self.world),
            on_ready=self._fill_pulse,
            on_reduced=self._read_pulse,
        )
        if self.probe is not None:
            self.probe.watch_model(model, self._reducer)
        for other in others:
            if isinstance(other, torch.optim.Optimizer):
                other.register_step_post_hook(self._on_optimizer_step)
        return (model, *others) if others else model

    def loader(
        self,
        dataset: Any,
        *,
        batch: int,
        weight: Weight | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        **options: Any,
    ) -> Loader:
        """Batches of this worker's share of the global batch; each sample once an epoch.

        `weight` gives what a batch's mean loss counts for, where that is not its samples: the
        number of tokens or pixels, say. Further options are those of `DataLoader`.
        """
        if self._loader is not None:
            raise ConfigError("loader", "a session has one; use session.evaluation for others")
        loader = Loader(
            self,
            dataset,
            batch=batch,
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
        """Epoch numbers from where the run stands."""
        if self._loader is None:
            raise ConfigError("epochs", "call session.loader(...) first")
        steps = len(self._loader)
        yield from range(self._next_step // steps, num)

    def register(self, name: str, thing: Any) -> None:
        """Keep an object with `state_dict` along with the run."""
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise ConfigError(name, "has no state_dict and load_state_dict")
        self._registered[name] = thing

    def sum(self, value: torch.Tensor | float) -> torch.Tensor:
        """The sum of a value over all workers. All must ask at the same point."""
        tensor = torch.as_tensor(value).detach()
        summed = tensor.to("cpu", copy=True)
        return self._group.sum(summed).to(tensor.device)

    def evaluation(self, dataset: Any, *, batch_size: int, **options: Any) -> DataLoader[Any]:
        """A loader over this worker's part of a dataset: over all workers each sample once.

        Parts follow the shares, so that all finish together. Add up counts with `session.sum`.
        """
        check_dataset(dataset, 1, options)
        last = self._plans[-1].shares if self._plans else (1,) * self.world
        low, high = cut(len(dataset), last)[self.rank]
        return DataLoader(Subset(dataset, range(low, high)), batch_size=batch_size, **options)

    # What the loader and the reducer call, in the order in which a step meets them.

    def shares_at(self, step: int) -> tuple[int, ...]:
        """The shares by rank that are valid at a step."""
        at = bisect_right(self._plans, step, key=lambda plan: plan.from_step)
        return self._plans[at - 1].shares

    def cursor(self, steps_per_epoch: int) -> tuple[int, int]:
        """The epoch and the step in it that come next."""
        return divmod(self._next_step, steps_per_epoch)

    def begin_step(self, step: int, *, samples: int, weight: float, total: int) -> None:
        """A batch is in hand."""
        if self._reducer is None:
            raise ConfigError("loader", "call session.prepare(model, ...) before the first batch")
        self._report = (samples, weight, float(total))
        self._reducer.weight = weight / total
        self._reports, self._in_hand = [], True
        self._began_s = time.monotonic()
        self._meter.begin()

    def _fill_pulse(self, used: list[bool]) -> torch.Tensor:
        if not self._in_hand:
            raise EvenstepError(
                "a backward pass outside of a loop over session.loader(...), on samples that "
                "nobody shares out. Take training batches from session.loader alone."
            )
        self._meter.ready()
        order = None
        if self._agent is not None:
            depth = self._loader.prefetched if self._loader else 0
            order = self._agent.take(self._next_step + 1 + depth)
        samples, weight, _ = self._report
        report = Report(
            samples=samples,
            compute_s=self._meter.compute_s(),
            wait_s=self._meter.wait_s,
            free_cpu=self._outlook.free_cpu,
            free_memory=self._outlook.free_memory,
            weight=weight,
        )
        return pulse.fill(self._next_step, self.world, self.rank, report, order, used)

    def _read_pulse(self, summed: torch.Tensor) -> tuple[float, list[bool]]:
        """All reports and the leader's plan; what makes the weights add up to one; who is used."""
        self._meter.reduced()
        self._reports, order, used = pulse.read(summed, self._next_step, self.world)
        if order is not None:
            self._plans.append(order)
        total = sum(r.weight for r in self._reports)
        return self._report[2] / total if total > 0 else 0.0, used

    def end_step(self, step: int) -> None:
        """The loop asks for the next batch: the step is done."""
        if not self._reports:
            raise EvenstepError(
                f"step {step} had no backward pass: every batch needs one on every rank"
            )
        self._next_step, self._in_hand = step + 1, False
        self._batches_since_step += 1
        if self._batches_since_step > FORGOTTEN:
            raise EvenstepError(
                f"no optimizer given to session.prepare has taken a step in {FORGOTTEN} batches. "
                "Pass the optimizer to prepare, and call optimizer.step()."
            )
        if self._agent is not None:
            now_s = time.monotonic()
            self._agent.report(now_s - self._started_s, step, now_s - self._began_s, self._reports)
            if self._agent.failure is not None:
                log.warning("the balancer has stopped, shares stay: %s", self._agent.failure)
                self._agent.failure = None
        if self.probe is not None:
            self.probe.end_step()

    def end_epoch(self, step: int) -> None:
        """The loader is through: running statistics kept by each worker become one."""
        if self._local_norms is not None and self.world > 1:
            share = float(self.shares_at(step)[self.rank])
            norm.average_buffers(self._local_norms, self._group, share)

    def _on_optimizer_step(self, *_: Any) -> None:
        self._batches_since_step = 0

    def _new_group(self, name: str, device: torch.device) -> Group:
        group = Group(
            self._store,
            1,
            self.rank,
            self.world,
            timeout_s=TIMEOUT_S,
            name=name,
            device=device,
            check=self._meeting.check_failure,
        )
        self._groups.append(group)
        return group

    def _agree(self, loader: Loader) -> None:
        """The leader learns of all workers and says the first shares."""
        facts = {
            "batch": loader.order.batch,
            "length": loader.order.length,
            "prefetched": loader.prefetched,
            "cores": float(len(os.sched_getaffinity(0))),
            "kind": f"{platform.machine()}-{len(os.sched_getaffinity(0))}",
            "cap": self._cap,
        }
        self._meeting.tell("facts", facts)
        every = self._meeting.hear_all("facts")
        for rank, other in enumerate(every):
            for name in ("batch", "length", "prefetched"):
                if other[name] != facts[name]:
                    raise ConfigError(
                        name, f"is {facts[name]} on rank {self.rank}, {other[name]} on rank {rank}"
                    )
        if self.probe is not None:
            self._plans = self.probe.plans(loader.order.batch, self.world)
            return
        if self.is_leader:
            batch = {"size": loader.order.batch, "min_share": self._min_share}
            settings = build(
                Settings,
                {"batch": batch, "workers": {"min": self.world}, **self._settings},
            )
            engine = Engine(settings)
            if self._journal is not None:
                engine.journal = Journal.create(self._journal, settings)
            width = len(str(self.world - 1))
            workers = [
                Worker(id=f"w{r:0{width}}", kind=f["kind"], cores=f["cores"], cap=f["cap"])
                for r, f in enumerate(every)
            ]
            self._agent = Agent(engine, workers)
            first = self._agent.take(0)
            if first is None:
                raise EvenstepError(self._agent.paused)
            self._meeting.tell("first", list(first.shares))
        self._plans = [RankPlan(from_step=0, shares=tuple(self._meeting.hear("first", 0)))]


def _dial(place: Place) -> Store:
    return TCPStore(place.address, place.port, None, place.hosts_store, wait_for_workers=False)
