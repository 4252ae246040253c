"""A session whose roster changes: workers join, leave and die, and the loop never notices.

A step whose group is gone is void: the loop runs on to its end with optimizers and schedulers that
do nothing, everything is put back, and the loader hands out the same samples again, cut for
whoever is left. Between steps the roster changes as the leader has passed on in the pulse.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from evenstep.errors import ConfigError
from evenstep.launch.environment import CoordinatorAddress
from evenstep.messages import Done, Failed, Generation, Leaving, Ready
from evenstep.train.comm.agreement import rows
from evenstep.train.comm.group import GroupGoneError
from evenstep.train.data.loader import Loader
from evenstep.train.recover.state import State
from evenstep.train.recover.undo import Undo, skip_if
from evenstep.train.reduce import pulse
from evenstep.train.reduce.pulse import RankPlan
from evenstep.train.roster.membership import LeaseOverError
from evenstep.train.roster.regroup import Regrouping

log = logging.getLogger("evenstep")

PARTING_S = 10.0
MOST_TOLD = 100_000  # letters of a traceback
FEW_WORKERS = 16  # buffers made beforehand have room for the pulse of so many, and four times that


class ElasticSession(Regrouping):
    """A worker of a run with a coordinator."""

    def __init__(
        self,
        where: CoordinatorAddress,
        settings: dict[str, Any],
        *,
        cap: int | None = None,
        min_share: int = 1,
        seed: int = 0,
        kind: str = "",
    ) -> None:
        super().__init__(where, settings, cap=cap, min_share=min_share, seed=seed, kind=kind)
        log.info("admitted to the run at %s as %s", where, self._member.worker)
        self._planned = 0  # the generation that the leader has passed on
        self._late = False  # others are further than its loop, and it has not joined in a step yet
        self._reported_by: Generation
        self._failed = False
        self._handled_before: Any = None
        self._pid = os.getpid()
        if threading.current_thread() is threading.main_thread():
            self._handled_before = signal.signal(signal.SIGTERM, self._leave_soon)

    # The step, from the loader's point of view.

    def enter(self) -> None:
        """Say that this worker is ready, wait for a generation with it, and take on its state."""
        if self.generation:
            return
        if self._loader is None or self._model is None:
            raise ConfigError("session", "call prepare(model, ...) and loader(...) first")
        _check_schedules(self._things.values())
        for thing in self._things.values():
            if isinstance(thing, torch.optim.Optimizer | LRScheduler):
                self._releases.append(skip_if(lambda: self.void, thing))
            if isinstance(thing, torch.optim.Optimizer):
                self._phases.add(thing)
        self._state = State({"model": self._model}, self._things, {})
        scalers = [t for t in self._things.values() if isinstance(t, torch.amp.GradScaler)]
        self._undo = Undo(self._model, scalers)
        self._checkpoints = self._open_checkpoints()
        assert self._reducer is not None
        self._reducer.warm_up(pulse.size(FEW_WORKERS))
        self._reducer.give_up_if(self._member.superseded, self._model)
        if self._member.control.welcome.underway:
            self._make_room()
        self._member.control.tell(
            Ready(
                **self._facts(self._loader),
                settings=self._all_settings(self._loader),
                model=_digest(self._model),
                address=self._address,
                port=self._port,
                sees_folder=self._checkpoints is not None,
            )
        )
        self._late = self._regroup()

    def settle(self, *, may_rest: bool) -> int:
        """Before a batch: repeat a void step with whoever is left, or switch as was passed on."""
        self._member.check_place()  # one who trains alone never waits, and would not notice
        if self._lost or self._member.newest > self.generation:  # a step begun now would be void
            self._regroup(may_rest=may_rest)
        if self.void:
            self._undo.forget()
            assert self._reducer is not None
            self.void = self._reducer.void = False
        # Gradients that no optimizer has used yet are no place to stop at, nor to take others in.
        if self._planned and not self._batches_since_step:
            planned, self._planned = self._planned, 0
            if planned > self.generation:
                self._regroup(planned, may_rest=may_rest)
        self._late = False
        every_s = self._member.control.welcome.checkpoint_every_s
        if self._saves and every_s and time.monotonic() - self._saved_s > every_s:
            self._save()
        return self.generation

    def fall_behind(self) -> None:
        """The others are in a later epoch: until this worker's loop is there, it is on its own."""
        self._late = True

    def begin_fetch(self) -> None:
        """A batch is about to be taken."""
        self._member.apart = False
        super().begin_fetch()

    def begin_step(self, step: int, *, samples: int, weight: float, total: int) -> None:
        """A batch is in hand."""
        self._undo.keep(accumulating=self._batches_since_step > 0)
        self._before, self._adopted = (self._at, self._batches_since_step), False
        self._phases.begin()
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

    # Sums.

    def _before_optimizer_step(self, *_: Any) -> None:
        if self._phases.several and not self._undo.has_all:
            self._undo.keep_all(self._state)
        self._phases.stepped = True

    def _fill_pulse(self, used: list[bool]) -> torch.Tensor:
        self._phases.backward()
        self._member.apart = False
        return super()._fill_pulse(used)

    def _find_scaler(self, scaler: torch.amp.GradScaler) -> None:
        if not scaler.is_enabled():  # it has no state
            return
        raise ConfigError(
            "scaler",
            "this GradScaler was not passed to session.prepare: joining workers would start with "
            "another scale, and a repeated step would update it twice. Use "
            "session.prepare(model, optimizer, scaler)",
        )

    def _part_of(self, length: int) -> tuple[int, int]:
        part = super()._part_of(length)
        return (0, length) if self._late else part

    def _waited(self, seconds: float) -> None:
        super()._waited(seconds)
        self._member.waiting = False

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        if self._late:
            log.warning(
                "a sum before this worker's first batch, in a run that is at step %d: the others "
                "took theirs before, and this one is of this worker's own value",
                self._next_step,
            )
            return values
        if self._lost:
            self._regroup()  # first: those ahead may have taken sums that this worker has not
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
                if self._in_hand and not self._is_reduced:
                    # The batch was cut for a roster that is gone.
                    self._gone(e)
                    return torch.zeros_like(values)
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
        self._member.waiting, self._member.apart = False, True
        self._at = self._at.after_step(self._next_step)
        self._reported_by = self._member.control.generations[self.generation]
        return answer

    def _tell_step(self, step: int, seconds: float) -> None:
        usual_s = self._member.usual_s
        self._member.usual_s = usual_s + 0.2 * (seconds - usual_s) if usual_s else seconds
        if self.is_leader:
            by = self._reported_by  # a sum within the step may have changed the generation
            loader = self._loader
            assert loader is not None
            begun = loader.epoch * loader.order.length + loader.cursor
            position = begun + int(self._report[2])
            self._reporter.step(by, step, seconds, self._reports, self._squared_norm(), position)

    # Beginning and leaving.

    def _meet(self, model: torch.nn.Module) -> None:
        """Later: `enter` guards whatever was prepared and registered by then."""

    def _agree(self, loader: Loader) -> None:
        """Later: this worker is ready when its loop begins."""

    def _leave_soon(self, *_: Any) -> None:
        if os.getpid() == self._pid:
            self._member.control.tell(Leaving(why="SIGTERM"))
            return
        # In a process that this one has forked, the signal means what it did before we came.
        signal.signal(signal.SIGTERM, self._handled_before or signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _trained(self) -> None:
        """Write the last checkpoint, before the script does anything else to the model."""
        if not self._saves or self._saved_step == self._next_step:
            return
        if self._batches_since_step:
            log.warning(
                "no checkpoint of the last step: gradients of %d batches were never used by an "
                "optimizer step",
                self._batches_since_step,
            )
            return
        try:
            self._save_committed(wait=False)  # others may wait for a sum after the loop
        except Exception:  # training is over, and the script has the model
            log.exception("the last checkpoint was not written")

    def _fail(self, error: BaseException) -> None:
        self._failed = True
        if isinstance(error, LeaseOverError) and self._saves:
            self._save_committed()
        if not isinstance(error, SystemExit):
            told = "".join(traceback.format_exception(error)).encode(errors="replace").decode()
            self._member.control.tell(Failed(told=told[-MOST_TOLD:]))

    def _part(self) -> None:
        control = self._member.control
        if self.void:  # nothing of a step that does not count is left behind
            self._undo.forget()
            self.void = False
        if not self._failed:
            self._trained()  # unless the script has left session.epochs(...) at its end before
        if self._checkpoints is not None:
            self._checkpoints.close()
        if signal.getsignal(signal.SIGTERM) == self._leave_soon:
            signal.signal(signal.SIGTERM, self._handled_before or signal.SIG_DFL)
        if not self._failed:
            control.tell(Done(step=self._next_step))
            until_s = time.monotonic() + PARTING_S
            while control.connected and control.goodbye is None and time.monotonic() < until_s:
                control.wait(0.05)
            why = control.goodbye or "trained to the end"
            log.info("%s leaves the run at step %d: %s", self._member.worker, self._next_step, why)
        control.close()


def _check_schedules(things: Iterable[Any]) -> None:
    """Raises if an optimizer has a scheduler, and the run was given none for it."""
    things = list(things)
    known = {id(thing.optimizer) for thing in things if isinstance(thing, LRScheduler)}
    for optimizer in things:
        if not isinstance(optimizer, torch.optim.Optimizer) or id(optimizer) in known:
            continue
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # as schedulers mark what they follow
            raise ConfigError(
                "scheduler",
                f"that of {type(optimizer).__name__} is not known to the run: workers that join "
                "would begin its schedule anew. Give it along: session.prepare(model, optimizer, "
                "scheduler)",
            )


def _digest(model: torch.nn.Module) -> str:
    """A short name for the parameters and buffers that a model has."""
    return blake2b(repr(rows(model)).encode(), digest_size=16).hexdigest()
