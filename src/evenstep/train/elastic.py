"""A session whose roster changes: workers join, leave and die, and the loop never notices.

A step whose group is gone is void: the loop runs on to its end with optimizers and schedulers that
do nothing, everything is put back, and the loader hands out the same samples again, cut for
whoever is left. Between steps the roster changes as the leader has passed on in the pulse.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
import traceback
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import Store

from evenstep.errors import ConfigError
from evenstep.launch.environment import Coordinator
from evenstep.messages import Began, Done, Failed, Generation, Leaving, Ready
from evenstep.train import pulse
from evenstep.train.checkpoint import Checkpoints
from evenstep.train.group import CPU, Group, GroupGoneError, PeerLostError, gather, reach
from evenstep.train.guard import Undo, skip_if
from evenstep.train.handover import hand_over
from evenstep.train.loader import Loader
from evenstep.train.meeting import rows
from evenstep.train.membership import EVICTED, LEFT, LeaseOverError, LeftError, Membership
from evenstep.train.position import Position, compare
from evenstep.train.pulse import RankPlan
from evenstep.train.reporter import Reporter
from evenstep.train.session import Session
from evenstep.train.state import State

log = logging.getLogger("evenstep")

TIMEOUT_S = 600.0  # of a sum, if all else fails
MEET_S = 10.0  # to make a group of ranks that are all there
PARTING_S = 10.0
FEW_WORKERS = 16  # buffers made beforehand have room for the pulse of so many, and four times that


class ElasticSession(Session):
    """A worker of a run with a coordinator."""

    def __init__(
        self,
        where: Coordinator,
        settings: dict[str, Any],
        *,
        cap: int | None = None,
        min_share: int = 1,
        seed: int = 0,
        kind: str = "",
    ) -> None:
        super().__init__(settings, cap=cap, min_share=min_share, seed=seed, kind=kind)
        self._member = Membership(where)
        self._address = where.address
        self._store, self._port = _host(where.address)
        self._state: State
        self._undo: Undo
        self._at = Position()
        self._before = (self._at, 0)  # as the step at hand began
        self._last_sum = torch.zeros(0, dtype=torch.uint8)  # its bytes: somebody may have missed it
        self._lost = False  # the group is gone, and there is no other yet
        self._adopted = False  # the step at hand was done by others, and the state is theirs
        self._planned = 0  # the generation that the leader has passed on
        self._reported_by: Generation
        self._reporter = Reporter(self._member.control.tell)
        self._checkpoints: Checkpoints | None = None
        self._saved_s = time.monotonic()
        self._failed = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._leave_soon)

    # The step, from the loader's point of view.

    def enter(self) -> None:
        """Say that this worker is ready, wait for a generation with it, and take on its state."""
        if self.generation:
            return
        if self._loader is None or self._model is None:
            raise ConfigError("session", "call prepare(model, ...) and loader(...) first")
        self._state = State({"model": self._model}, self._things, {})
        scalers = [t for t in self._things.values() if isinstance(t, torch.amp.GradScaler)]
        self._undo = Undo(self._model, scalers)
        welcome = self._member.control.welcome
        if welcome.run and Path(welcome.run).is_dir():
            folder = Path(welcome.run) / "checkpoints"
            self._checkpoints = Checkpoints(folder, keep=welcome.checkpoints_kept)
        assert self._reducer is not None
        self._reducer.warm_up(pulse.size(FEW_WORKERS))
        self._member.control.tell(
            Ready(
                **self._facts(self._loader),
                settings=self._all_settings(self._loader),
                model=_digest(self._model),
                address=self._address,
                port=self._port,
            )
        )
        self._regroup()

    def settle(self) -> int:
        """Before a batch: repeat a void step with whoever is left, or switch as was passed on."""
        self._member.check_place()  # one who trains alone never waits, and would not notice
        if self._lost:
            self._regroup()
        if self.void:
            self._undo.forget()
            self.void = False
        planned, self._planned = self._planned, 0
        if planned > self.generation:
            self._regroup(planned)
        every_s = self._member.control.welcome.checkpoint_every_s
        if self.is_leader and every_s and time.monotonic() - self._saved_s > every_s:
            self._save()
        return self.generation

    def begin_step(self, step: int, *, samples: int, weight: float, total: int) -> None:
        """A batch is in hand."""
        self._undo.keep(accumulating=self._batches_since_step > 0)
        self._before, self._adopted = (self._at, self._batches_since_step), False
        super().begin_step(step, samples=samples, weight=weight, total=total)

    def end_step(self, step: int) -> None:
        """The step is done, by this worker or by those it has its state from; or it was void."""
        if self.void:
            self._in_hand = False
        elif self._adopted:
            self._next_step, self._in_hand = step + 1, False
        else:
            super().end_step(step)
        self._member.step = self._next_step

    def end_epoch(self) -> None:
        """Nobody goes on before all have the epoch's last step: whoever is behind gets it here."""
        self._sum(torch.zeros(1))
        super().end_epoch()

    # Into a new generation.

    def _regroup(self, planned: int = 0) -> None:
        """Into a newer generation, as often as it takes, with the state of the furthest of it."""
        if self.void:
            self._undo.restore()  # a forward pass may have gone on after the group was gone
        while True:
            told = self._member.next(planned)
            begun_s = time.monotonic()
            if told.number == planned:
                self._farewell(told)
            self._let_go()
            if self._member.worker in told.spares:
                log.info("this worker waits as a spare: %s", told.reason)
                self._member.rest(told)
                self._at, planned = Position(), 0  # whatever it has will be old
                continue
            if self._member.worker not in told.roster:
                log.info("this worker leaves: %s", told.reason)
                raise LeftError(LEFT if told.planned else EVICTED)
            try:
                self._form(told)
                self._catch_up()
                break
            except GroupGoneError as e:
                log.info("generation %d did not come about: %s", told.number, e)
        self._lost, self._member.begun = False, True
        self._member.step = self._next_step
        self._plans = [RankPlan(from_step=self._next_step, shares=told.shares)]
        self._measures = told.measures
        if told.lr_factor != self._rate.target:
            # Some may be within a step that all have reduced: it keeps the rate it began with.
            self._rate.aim(self._at.steps, told.lr_factor, told.lr_warmup_steps)
        if self.is_leader:
            self._reporter.look_closely()
            self._member.control.tell(Began(generation=told.number, step=self._next_step))
        took_ms = (time.monotonic() - begun_s) * 1000
        log.info(
            "generation %d at step %d: rank %d of %d, after %.0f ms; %s",
            *(told.number, self._next_step, self.rank, self.world, took_ms, told.reason),
        )

    def _farewell(self, told: Generation) -> None:
        """If somebody leaves, all see each other through the step before anyone hangs up."""
        if set(self._member.roster) <= set(told.roster):
            return
        if not told.roster and self.is_leader:
            self._save(wait=True)
        try:
            self._group.sum(torch.zeros(1))
        except GroupGoneError as e:
            log.debug("somebody left without a word: %s", e)

    def _form(self, told: Generation) -> None:
        self.rank, self.world = self._member.enter(told)
        self.generation = told.number
        store = self._store
        if self.rank > 0:
            store = reach(told.address, told.port, self._member.check)
        gather(store, told.number, self.rank, self.world, self._member.check)

        def make(name: str, device: torch.device) -> Group:
            group = Group(
                store,
                told.number,
                self.rank,
                self.world,
                timeout_s=TIMEOUT_S,
                meet_s=MEET_S,
                name=name,
                device=device,
                address=self._address,
                check=self._member.check,
                last_words_s=0.0,
            )
            self._groups.append(group)
            return group

        self._group = make("control", CPU)
        self._join_groups(make, on_gone=self._gone)

    def _catch_up(self) -> None:
        """Whoever is behind gets the state of those ahead; one who missed a sum gets that."""
        mine = replace(self._at, begun=self._at.begun and not self._state.torn)
        ahead = compare(self._group, mine, gradients=self._batches_since_step > 0)
        if not ahead.position.begun and self.is_leader:
            self._load_checkpoint()
        behind = [rank for rank in range(self.world) if rank not in ahead.sources]
        self._state.plain = self._plain()
        hand_over(self._group, ahead.sources, behind, self._state, grads=ahead.gradients)
        if self.rank in behind:
            self._take_on(self._state.plain)
            # In the midst of a step that others have reduced: it is this worker's now, too.
            self.void, self._adopted = False, True
        self._last_sum = ahead.last_sum(self._group, self._last_sum)
        self._at = replace(ahead.position, begun=True, steps=max(ahead.position.steps, self.step))

    def _plain(self) -> dict[str, Any]:
        assert self._loader is not None
        return {
            "step": self._next_step,
            "unused": self._batches_since_step,
            "order": self._loader.state_dict(),
            "rate": self._rate.state_dict(),
            "random": torch.get_rng_state(),
        }

    def _take_on(self, plain: dict[str, Any]) -> None:
        assert self._loader is not None
        self._loader.load_state_dict(plain["order"])
        self._rate.load_state_dict(plain["rate"])
        self._next_step, self._batches_since_step = plain["step"], plain["unused"]
        torch.set_rng_state(plain["random"])

    # What can go wrong in the midst of a step, and of a sum.

    def _gone(self, error: GroupGoneError) -> None:
        """The step is void. Letting the group go frees those who still wait in it."""
        assert self._reducer is not None
        log.info("step %d is void: %s", self._next_step, error)
        if isinstance(error, PeerLostError):
            self._member.complain(0.0)
        self.void = self._lost = self._reducer.void = True
        self._at, self._batches_since_step = self._before
        self._undo.restore()
        self._let_go()

    def _let_go(self) -> None:
        if self._reducer is not None:
            self._reducer.let_go()
        groups, self._groups = self._groups, []
        for group in groups:
            group.close(0.0)

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        wanted = self._at.sums + 1
        while self._at.sums < wanted:
            if self._lost:
                self._regroup()
                continue
            if self.void:  # for everyone: what it would have added up is thrown away with the step
                return torch.zeros_like(values)
            mine = values.clone()
            try:
                self._group.sum(mine)
            except GroupGoneError as e:
                log.info("a sum is repeated: %s", e)
                self._lost = True
                self._let_go()
                continue
            self._at = self._at.after_sum(mine)
            self._last_sum = mine.reshape(-1).view(torch.uint8)
        self._member.waiting = False
        return self._last_sum.clone().view(values.dtype).view(values.shape)

    # Orders and reports.

    def _orders(self) -> tuple[RankPlan | None, int]:
        if not self.is_leader:
            return None, 0
        told = self._member.control.take_plan(self.generation)
        plan = None
        if told is not None:
            plan = RankPlan(
                from_step=self._plan_from(), shares=told.shares, lr_factor=told.lr_factor
            )
            self._reporter.look_closely()
        return plan, max(0, self._member.control.newest - self.generation)

    def _switch(self, ahead: int) -> None:
        self._planned = self.generation + ahead

    def _read_pulse(self, summed: torch.Tensor) -> tuple[float, list[bool]]:
        answer = super()._read_pulse(summed)
        self._member.waiting = False
        self._at = self._at.after_step(self._next_step)
        self._reported_by = self._member.control.generations[self.generation]
        return answer

    def _tell_step(self, step: int, seconds: float) -> None:
        usual_s = self._member.usual_s
        self._member.usual_s = usual_s + 0.2 * (seconds - usual_s) if usual_s else seconds
        if self.is_leader:
            by = self._reported_by  # a sum within the step may have changed the generation
            self._reporter.step(by, step, seconds, self._reports, self._squared_norm())

    # Checkpoints.

    def _load_checkpoint(self) -> None:
        """Nobody trains yet: the run goes on where its newest checkpoint ends, if it has one."""
        found = self._checkpoints.newest() if self._checkpoints is not None else None
        if found is not None:
            self._state.apply(found.tree)
            self._take_on(self._state.plain)
            log.info("going on from %s at step %d", found.path.name, self._next_step)

    def _save(self, *, wait: bool = False) -> None:
        """A checkpoint of the steps done so far; never in the midst of accumulating gradients."""
        if self._checkpoints is None or self._batches_since_step:
            return
        self._saved_s = time.monotonic()
        self._state.plain = self._plain()
        self._checkpoints.save(self._next_step, self._state)
        if wait:
            self._checkpoints.close()

    # Beginning and leaving.

    def _meet(self, model: torch.nn.Module) -> None:
        for thing in self._things.values():
            if isinstance(thing, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
                skip_if(lambda: self.void, thing)

    def _agree(self, loader: Loader) -> None:
        """Later: this worker is ready when its loop begins."""

    def _leave_soon(self, *_: Any) -> None:
        self._member.control.tell(Leaving(why="SIGTERM"))

    def _fail(self, error: BaseException) -> None:
        self._failed = True
        if isinstance(error, LeaseOverError) and self.is_leader:
            self._save(wait=True)
        if not isinstance(error, SystemExit):
            told = "".join(traceback.format_exception(error))
            self._member.control.tell(Failed(told=told))

    def _part(self) -> None:
        control = self._member.control
        if self._checkpoints is not None:
            self._checkpoints.close()
        if not self._failed:
            control.tell(Done(step=self._next_step))
            until_s = time.monotonic() + PARTING_S
            while control.connected and control.goodbye is None and time.monotonic() < until_s:
                control.wait(0.05)
        control.close()


def _host(address: str) -> tuple[Store, int]:
    """A store of this worker's own, for the generations that it leads."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.bind((address, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    store = TCPStore(
        address, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def _digest(model: torch.nn.Module) -> str:
    """A short name for the parameters and buffers that a model has."""
    return blake2b(repr(rows(model)).encode(), digest_size=16).hexdigest()
