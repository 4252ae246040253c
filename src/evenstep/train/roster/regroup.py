"""Into a new generation: the group is made anew, and whoever is behind gets the state of the rest.

What goes with it is here too: a step that is void is put back, and checkpoints are kept for when
nobody is left.
"""

from __future__ import annotations

import logging
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import Store
from torch.optim.lr_scheduler import LRScheduler

from evenstep.errors import ConfigError, EvenstepError
from evenstep.launch.environment import CoordinatorAddress
from evenstep.messages import Began, Generation
from evenstep.train.comm.group import CPU, Group, GroupGoneError, PeerLostError, gather, reach
from evenstep.train.failpoint import failpoint
from evenstep.train.plan.remote import Reporter
from evenstep.train.recover.checkpoint import Checkpoints
from evenstep.train.recover.handover import hand_over
from evenstep.train.recover.preallocate import make_room
from evenstep.train.recover.state import State
from evenstep.train.recover.undo import Phases, Undo, card_random, set_card_random
from evenstep.train.reduce.pulse import RankPlan
from evenstep.train.roster.membership import EVICTED, LEFT, LeftError, Membership
from evenstep.train.roster.position import Position, compare
from evenstep.train.session import Session

log = logging.getLogger("evenstep")

TIMEOUT_S = 7200.0  # of a sum, if all else fails: longer than any patience of the coordinator's
MEET_S = 10.0  # to make a group of ranks that are all there


class Regrouping(Session):
    """A session whose generation changes."""

    def __init__(
        self,
        where: CoordinatorAddress,
        settings: dict[str, Any],
        *,
        cap: int | None,
        min_share: int,
        seed: int,
        kind: str,
    ) -> None:
        super().__init__(settings, cap=cap, min_share=min_share, seed=seed, kind=kind)
        self._member = Membership(where)
        self._address, self._token = where.address, where.token
        self._store, self._port = _host(where.address)
        self._reporter = Reporter(self._member.control.tell)
        self._state: State
        self._undo: Undo
        self._phases = Phases()
        self._at = Position()
        self._before = (self._at, 0)  # as the step at hand began
        self._last_sum = torch.zeros(0, dtype=torch.uint8)  # its bytes: somebody may have missed it
        self._roomy: list[torch.optim.Optimizer] = []  # whose state is but room for one
        self._lost = False  # the group is gone, and there is no other yet
        self._checkpoints: Checkpoints | None = None
        self._saves = False  # it is this worker who writes them
        self._saved_s = time.monotonic()
        self._saved_step = -1

    def _regroup(self, planned: int = 0, *, may_rest: bool = False) -> bool:
        """Into a newer generation, as often as it takes, with the state of the furthest of it.

        Whether anyone of it had begun to train before. A spare waits here until it is called back,
        if it `may_rest` at this point of the loop; otherwise it leaves.
        """
        if self.void:
            self._roll_back()  # the forward pass may have run on after the group was lost
        while True:
            told = self._member.next(planned)
            begun_s = time.monotonic()
            if told.number == planned:
                self._farewell(told)
            self._let_go()
            if may_rest and self._member.worker in told.spares:
                log.info("%s waits as a spare: %s", self._member.worker, told.reason)
                self._member.rest(told)
                self._at, planned = Position(), 0  # whatever it has will be old
                continue
            if self._member.worker not in told.roster:
                if self._member.worker == told.saves:
                    self._save_committed()
                log.info("%s", leave_message(self._member.worker, self._next_step, told))
                asked = told.planned or self._member.worker in told.spares
                raise LeftError(LEFT if asked else EVICTED)
            try:
                self._form(told)
                had_begun = self._catch_up()
                break
            except GroupGoneError as e:
                log.info("generation %d did not come about: %s", told.number, e)
        self._lost, self._member.begun, self._member.waiting = False, True, False
        self._member.step = self._next_step
        assert self._reducer is not None
        self._reducer.void = self.void  # in the midst of a step that is void, it stays so
        self._begin_saving(told.saves == self._member.worker)
        self._plans = [RankPlan(from_step=self._next_step, shares=told.shares)]
        self._measures, self._warmup_steps = told.measures, told.lr_warmup_steps
        if told.lr_factor != self._rate.target:
            # Some may be within a step that all have reduced: it keeps the rate it began with.
            self._rate.aim(self._at.steps, told.lr_factor, told.lr_warmup_steps)
        if self.is_leader:
            self._reporter.look_closely()
            self._member.control.tell(Began(generation=told.number, step=self._next_step))
        took_ms = (time.monotonic() - begun_s) * 1000
        log.info(
            "%s is rank %d of %d in generation %d, at step %d after %.0f ms; %s",
            *(self._member.worker, self.rank, self.world, told.number),
            *(self._next_step, took_ms, told.reason),
        )
        return had_begun

    def _farewell(self, told: Generation) -> None:
        """If somebody leaves, all see each other through the step before anyone hangs up."""
        if set(self._member.roster) <= set(told.roster):
            return
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
        failpoint("rendezvous")
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

    def _catch_up(self) -> bool:
        """Whoever is behind gets the state of those ahead; one who missed a sum gets that.

        Whether there was anyone ahead.
        """
        mine = replace(self._at, begun=self._at.begun and not self._state.torn)
        failpoint("compare")
        ahead = compare(self._group, mine, gradients=self._batches_since_step > 0)
        if not ahead.position.begun:
            self._give_up_room()
            if self.is_leader:
                self._load_checkpoint()
            if self.is_leader and self._state.torn:
                raise EvenstepError(
                    "those who trained were lost while they handed their state to this worker, "
                    "which has a part of it, and there is no checkpoint. Start the run anew; "
                    "--checkpoint-every writes checkpoints more often."
                )
        behind = [rank for rank in range(self.world) if rank not in ahead.sources]
        self._state.plain = self._plain()
        failpoint("handover")
        hand_over(self._group, ahead.sources, behind, self._state, grads=ahead.gradients)
        if self.rank in behind:
            if not ahead.gradients:
                self._undo.drop_gradients()  # of batches that the others' optimizers have used
            self._take_on(self._state.plain)
            # In the midst of a step that others have reduced: it is this worker's now, too.
            self.void, self._adopted = False, True
            self._roomy.clear()
        self._last_sum = ahead.last_sum(self._group, self._last_sum)
        self._at = replace(ahead.position, begun=True, steps=max(ahead.position.steps, self.step))
        return ahead.position.begun

    def _make_room(self) -> None:
        """For the state that the others will hand over, while they train."""
        for thing in self._things.values():
            if isinstance(thing, torch.optim.Optimizer) and not thing.state:
                make_room(thing)
                self._roomy.append(thing)

    def _give_up_room(self) -> None:
        """Those who had a state are gone."""
        for optimizer in self._roomy:
            optimizer.state.clear()

    def _plain(self) -> dict[str, Any]:
        assert self._loader is not None
        return {
            "step": self._next_step,
            "unused": self._batches_since_step,
            "order": self._loader.state_dict(),
            "rate": self._rate.state_dict(),
            "random": torch.get_rng_state(),
            "card_random": card_random(self._device),
        }

    def _take_on(self, plain: dict[str, Any]) -> None:
        assert self._loader is not None
        self._loader.load_state_dict(plain["order"])
        self._rate.load_state_dict(plain["rate"])
        self._next_step, self._batches_since_step = plain["step"], plain["unused"]
        torch.set_rng_state(plain["random"])
        set_card_random(self._device, plain.get("card_random"))  # older checkpoints have none

    # A step that does not count.

    def _gone(self, error: GroupGoneError) -> None:
        """The step is void. Letting the group go frees those who still wait in it."""
        assert self._reducer is not None
        log.info("step %d is void: %s", self._next_step, error)
        if isinstance(error, PeerLostError):
            self._member.complain(0.0)
        self.void = self._lost = self._reducer.void = True
        if not self._can_roll_back:
            raise EvenstepError(
                f"step {self._next_step} is void, and an optimizer had taken a step in it before "
                "its last backward pass, for the first time: that cannot be undone. Go on from the "
                "newest checkpoint by evenstep run --resume."
            ) from error
        self._roll_back()
        ours = (torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)  # skipped, or kept before
        self._undo.keep_registered(t for t in self._things.values() if not isinstance(t, ours))
        self._let_go()

    @property
    def _can_roll_back(self) -> bool:
        """Whether the state at the start of the step at hand is still known."""
        return not self._phases.stepped or self._undo.has_all

    def _roll_back(self) -> None:
        """Return to the state in which the step at hand began."""
        self._at, self._batches_since_step = self._before
        self._undo.restore()

    @property
    def _is_reduced(self) -> bool:
        """Whether the batch in hand has had its last backward pass, and that is with all."""
        return self._at.steps > self._next_step and not self._phases.several

    def _let_go(self) -> None:
        if self._reducer is not None:
            self._reducer.let_go()
        groups, self._groups = self._groups, []
        for group in groups:
            group.close(0.0)

    # Checkpoints.

    def _open_checkpoints(self) -> Checkpoints | None:
        """The run's, if this host has its folder: one of the same name has not the same token."""
        welcome = self._member.control.welcome
        if not welcome.run:
            return None
        folder = Path(welcome.run)
        with suppress(OSError):
            if (folder / "token").read_text(encoding="utf-8").strip() == self._token:
                return Checkpoints(folder / "checkpoints", keep=welcome.checkpoints_kept)
        log.info("%s is not on this host: this worker writes no checkpoints", folder)
        return None

    def _load_checkpoint(self) -> None:
        """Nobody trains yet: the run goes on where its newest checkpoint ends, if it has one."""
        found = self._checkpoints.newest() if self._checkpoints is not None else None
        newest = self._member.control.welcome.resume
        if found is None and newest:
            raise ConfigError(
                "resume",
                f"the run's newest checkpoint is {newest} on the coordinator's host, and "
                f"{socket.gethostname()}, whose worker leads, can read none. Share the folder "
                "between the hosts, or start the first worker where it is",
            )
        if found is not None:
            self._state.apply(found.tree)
            self._take_on(self._state.plain)
            log.info("going on from %s at step %d", found.path.name, self._next_step)

    def _begin_saving(self, saves: bool) -> None:
        """It may now be this worker who writes them: from when the one before wrote the last on."""
        if saves and not self._saves and self._checkpoints is not None:
            written_s = time.monotonic() - self._checkpoints.age_s()
            self._saved_s = max(self._saved_s, written_s)
        self._saves = saves

    def _save(self, *, wait: bool = False) -> None:
        """A checkpoint of the steps done so far; never in the midst of accumulating gradients."""
        if self._checkpoints is None or self._batches_since_step:
            return
        self._saved_s, self._saved_step = time.monotonic(), self._next_step
        self._state.plain = self._plain()
        self._checkpoints.save(self._next_step, self._state)
        if wait:
            self._checkpoints.close()

    def _save_committed(self, *, wait: bool = True) -> None:
        """Write a last checkpoint of the committed steps, if this worker still has that state.

        It does not between a step's reduction and the step's end: optimizers and schedulers may
        or may not have stepped. Nor does it if it cannot undo what the step has changed so far.
        """
        if not self._member.begun or self._state.torn:
            return
        # A void step counts as unfinished until the next batch, also while no batch is in hand: the
        # loop ran to its end, and its forward pass may have updated buffers after the group was
        # lost.
        if self._in_hand or self.void:
            if self._adopted or self._is_reduced or not self._can_roll_back:
                return
            self._roll_back()
        self._save(wait=wait)


def leave_message(worker: str, step: int, told: Generation) -> str:
    """What to log when a worker is not in the roster of the next generation."""
    if not told.roster:
        return f"{worker} leaves the run at step {step}: the run is stopping ({told.reason})"
    if told.planned:
        return f"{worker} leaves the run at step {step}, as asked: {told.reason}"
    return f"{worker} is evicted at step {step}: {told.reason}"


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
