"""A session with a fixed roster: alone, or under torchrun, the brain in a thread of rank 0."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from evenstep.config import Settings
from evenstep.decide.learning_rate import global_batch
from evenstep.engine import Engine
from evenstep.errors import ConfigError, EvenstepError
from evenstep.journal import Journal
from evenstep.launch.environment import StaticRank
from evenstep.messages import ALIKE, differ
from evenstep.strict import build
from evenstep.train.comm.address import own_address
from evenstep.train.comm.agreement import Meeting, check_models
from evenstep.train.comm.group import CPU, Group, GroupGoneError, PeerLostError
from evenstep.train.data.loader import Loader
from evenstep.train.plan.local import Agent
from evenstep.train.recover.flatten import bytes_of
from evenstep.train.recover.handover import Spec
from evenstep.train.recover.state import State
from evenstep.train.reduce.pulse import RankPlan
from evenstep.train.session import Session
from evenstep.types import Worker
from evenstep.verify.probe import Probe

log = logging.getLogger("evenstep")

TIMEOUT_S = 600.0
ASK_S = 0.25  # of a wait for peers, before the store is asked for word of one: rank 0 has to answer


class FixedSession(Session):
    """One generation for good: a rank that fails ends the run."""

    def __init__(
        self,
        place: StaticRank,
        settings: dict[str, Any],
        *,
        cap: int | None = None,
        min_share: int = 1,
        seed: int = 0,
        kind: str = "",
        journal: Path | None = None,
    ) -> None:
        super().__init__(settings, cap=cap, min_share=min_share, seed=seed, kind=kind)
        self.rank, self.world, self.generation = place.rank, place.world, 1
        self.probe = Probe.find(os.environ, place.rank)
        self._journal = journal
        self._stays = place.hosts_store  # at the end, until all have parted
        self._store = store = HashStore() if place.world == 1 else _dial(place)
        self._meeting = Meeting(store, place.rank, place.world, TIMEOUT_S)
        self._agent: Agent | None = None
        self._address = ""
        try:
            if place.world > 1:
                self._address = own_address(self._meeting, place.address, place.port)
            self._group = self._new_group("control", CPU)
        except BaseException as e:  # nobody has entered the session yet: tell the others here
            self._meeting.fail(e)
            raise

    def enter(self) -> None:
        """Nothing to do: a rank is in from the start."""

    def settle(self, *, may_rest: bool) -> int:
        """The roster never changes."""
        return self.generation

    def fall_behind(self) -> None:
        """Nobody does, without a spare."""

    def _meet(self, model: torch.nn.Module) -> None:
        check_models(self._meeting, model)
        for tensor in State({"model": model}, {}, {}).collect()["models"]["model"].values():
            self._spread(tensor)
        self._join_groups(self._new_group)

    @torch.no_grad()
    def _spread(self, tensor: torch.Tensor) -> None:
        """The leader's numbers on every rank, as bytes: Gloo does not know all kinds of them."""
        if self.world == 1 or not tensor.numel():
            return
        dims = Spec.of(tensor).dims
        laid = tensor.resolve_conj().resolve_neg().permute(dims).contiguous()
        self._group.broadcast(bytes_of(laid))
        if laid.data_ptr() != tensor.data_ptr():
            tensor.permute(dims).copy_(laid)

    def _agree(self, loader: Loader) -> None:
        """The leader learns of all workers and says the first shares."""
        facts = self._facts(loader)
        self._meeting.tell("facts", facts)
        every = self._meeting.hear_all("facts")
        for rank, other in enumerate(every):
            for name in ALIKE:
                if other.get(name) != facts.get(name):  # models have been compared before
                    mine, theirs = (f"on rank {r}" for r in (self.rank, rank))
                    raise ConfigError(name, differ(name, facts[name], mine, other[name], theirs))
        if self.probe is not None:
            self._plans = self.probe.plans(global_batch(loader.batch, self.world), self.world)
            return
        if self.is_leader:
            told = {"workers": {"min": self.world}, **self._all_settings(loader)}
            settings = build(Settings, told)
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
            rule, warmup = settings.batch.lr_rule, settings.batch.lr_warmup_steps
            self._meeting.tell("first", [first.shares, first.lr_factor, rule, warmup])
        shares, lr_factor, rule, warmup = self._meeting.hear("first", 0)
        self._plans = [RankPlan(from_step=0, shares=tuple(shares), lr_factor=lr_factor)]
        self._warmup_steps = warmup
        self._rate.aim(0, lr_factor, warmup if lr_factor != 1.0 else 0)
        self._measures = rule == "adascale"

    def _orders(self) -> tuple[RankPlan | None, int]:
        return (self._agent.take(self._plan_from()) if self._agent else None), 0

    def _switch(self, ahead: int) -> None:
        raise AssertionError("a fixed roster has one generation")

    def _before_optimizer_step(self, *_: Any) -> None:
        """Nothing is ever undone."""

    def _gone(self, error: GroupGoneError) -> None:
        raise error

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        return self._group.sum(values)

    def _tell_step(self, step: int, seconds: float) -> None:
        if self._agent is None:
            return
        now_s = time.monotonic() - self._started_s
        self._agent.report(now_s, step, seconds, self._reports, self._squared_norm())
        if self._agent.failure is not None:
            log.warning("the balancer has stopped, shares stay: %s", self._agent.failure)
            self._agent.failure = None

    def _trained(self) -> None:
        """Nothing to do: a fixed roster keeps no checkpoints."""

    def _fail(self, error: BaseException) -> None:
        self._meeting.fail(error)
        # Until all know why: torchrun ends with its first rank, and the store may go with it.
        self._stays = self._stays or not isinstance(error, PeerLostError)

    def _part(self) -> None:
        if self._agent is not None:
            self._agent.close()
        self._meeting.part(stay=self._stays)

    def _new_group(self, name: str, device: torch.device) -> Group:
        group = Group(
            self._store,
            self.generation,
            self.rank,
            self.world,
            timeout_s=TIMEOUT_S,
            name=name,
            device=device,
            address=self._address,
            check=lambda _: self._meeting.check_failure(),
            slice_s=ASK_S,
        )
        self._groups.append(group)
        return group


def _dial(place: StaticRank) -> Store:
    return TCPStore(place.address, place.port, None, place.hosts_store, wait_for_workers=False)
