"""How the roster of a run changes: planned ones one by one, losses at once, and the end.

A generation exists only if it is announced here. Numbers only grow, also over restarts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import assert_never

import msgspec

from evenstep.coordinate.member import Ending, Member, State
from evenstep.coordinate.standing import Standing
from evenstep.messages import (
    Generation,
    Goodbye,
    NewPlan,
    Paused,
)
from evenstep.types import (
    AnyAction,
    AnyEvent,
    Drain,
    Joined,
    Launch,
    LaunchFailed,
    Left,
    Lost,
    Pause,
    Plan,
    Regroup,
    Stay,
    WorkerId,
)

log = logging.getLogger("evenstep")


class Changes(Standing):
    """From the generation that trains to the one that comes."""

    # Planned, and not.

    def _advance(self, now_s: float) -> None:
        """Make the next planned change, unless one is under way."""
        while self._brain and not (self._coming or self._away or self._finishing or self.ending):
            ready, asked = self._all_in(State.READY), self._all_in(State.ASKED)
            if self._stopping:
                self._part(now_s)
                return
            if ready and not self._gathers(now_s):
                self._take_in(now_s, ready)
            elif asked and len(asked) == len(self._roster):
                if self._call_spares(1, f"in place of {asked[0].id}"):
                    continue
                if self._on_the_way():
                    return  # whoever comes has the state handed over first
                self.stop(now_s, f"all workers leave: {asked[0].leaves_because}")
            elif asked:
                for member in asked:
                    member.state = State.LEFT
                ids = tuple(m.id for m in asked)
                self._change(now_s, Left(workers=ids, cause=asked[0].leaves_because), planned=True)
            else:
                return

    def _take_in(self, now_s: float, ready: list[Member]) -> None:
        ready.sort(key=lambda m: (m.num_unmet, len(m.id), m.id))  # w2 before w10
        # Who has not met the others before comes alone: so it is seen who of several cannot.
        ready = [m for m in ready if not m.num_unmet] or ready[:1]
        for member in ready:
            member.state = State.IN
            self._used.add(member.id)
        self._stores = {w: store for w, store in self._stores.items() if w in self._members}
        self._outside.keep(self._stores)
        workers = tuple(m.worker for m in ready if m.worker is not None)
        assert len(workers) == len(ready), "all who are ready have said what they are"
        self._change(now_s, Joined(workers=workers), planned=True)

    def _lose(self, now_s: float, lost: Mapping[WorkerId, str]) -> None:
        """Workers are gone: the others go on without them, at once, and spares come after."""
        left = False
        for worker, cause in lost.items():
            log.warning("%s is lost: %s", worker, cause)
            self._last_loss = f"{worker} was lost: {cause}"
            self.crew.missed.add(worker)
            member = self._members.pop(worker, None)
            if member is not None and member.state is State.ASKED:
                self.crew.in_order.add(worker)  # it was going: nobody comes in its place
            left |= member is not None and member.state is State.LEFT and self._in_running(worker)
        if self._brain is None:
            return
        known = {w: why for w, why in lost.items() if w in self._brain.cluster.workers}
        if self._away:
            self._missing |= known
        elif self._parting:
            self._hurry()
        elif known:
            for worker in known:
                going = worker in self.crew.in_order
                if not going and self._call_spares(1, f"in place of {worker}"):
                    self.crew.relieved.add(worker)
            self._go_on(now_s, known)
        elif left:
            self._force()

    def _part_with(self, now_s: float, member: Member, why: str, *, dead: bool) -> None:
        """A connection or its process has ended: a loss, unless nothing more was expected."""
        if member.trains and self.ending is None and (dead or not self._parting):
            self._lose(now_s, {member.id: why})
            return
        del self._members[member.id]
        if member.trains or member.state in (State.LEFT, State.DONE, State.SPARE):
            self.crew.in_order.add(member.id)
        if member.state is State.LEFT and self._in_running(member.id):
            # It may have gone at the very step's end at which it was to go.
            self._leaver_gone_s = now_s
            if dead:
                self._force()

    def _go_on(self, now_s: float, lost: Mapping[WorkerId, str]) -> None:
        """The others go on at once, without the lost and those who have trained to the end."""
        assert self._brain is not None
        actions: tuple[AnyAction, ...] = ()
        finished: tuple[WorkerId, ...] = ()
        if self._finishing:
            if not any(m.trains for m in self._members.values()):
                return
            self._finishing = False
            roster = self._brain.cluster.roster
            finished = tuple(w for w in roster if w not in lost and not self._trains(w))
            for member in self._members.values():
                if member.state is State.DONE:
                    self._dismiss(member, "trained to the end")
            left = Left(workers=finished, cause="trained to the end")
            actions = self._brain.handle(now_s, left)
        if newcomers := self._put_off():
            left = Left(workers=newcomers, cause="to be taken in later")
            actions = self._brain.handle(now_s, left)
        if lost:
            cause = next(iter(lost.values()))
            actions = self._brain.handle(now_s, Lost(workers=tuple(lost), cause=cause))
        if finished and any(isinstance(action, Pause) for action in actions):
            self._end(now_s, Ending(ok=True, why="trained to the end"))
            return
        if not actions:
            self._force()  # who is through was to leave anyway, with a change that is announced
        self._obey(now_s, actions, planned=False)

    def _meet_anew(self, now_s: float, why: str) -> None:
        """A new generation of the same workers: for the brain, one goes and comes back."""
        assert self._brain is not None
        if self._newcomers():
            self._go_on(now_s, {})  # the newcomers come later
            return
        last = self._brain.cluster.ranks[-1]
        self._brain.handle(now_s, Left(workers=(last.id,), cause=why))
        self._change(now_s, Joined(workers=(last,)), planned=False)

    def _put_off(self) -> tuple[WorkerId, ...]:
        """Workers that were to join, and join later: a change at once finds others within a step.

        What those may still have to add up in it, somebody who has not begun cannot.
        """
        newcomers = self._newcomers()
        for member in newcomers:
            if member.state is State.IN:
                member.state = State.READY
            else:
                self._dismiss(member, member.leaves_because)
        return tuple(m.id for m in newcomers)

    # Orders into messages.

    def _change(self, now_s: float, event: AnyEvent, *, planned: bool) -> None:
        assert self._brain is not None
        self._obey(now_s, self._brain.handle(now_s, event), planned=planned)

    def _obey(self, now_s: float, actions: tuple[AnyAction, ...], *, planned: bool) -> None:
        regroup: Regroup | None = None
        for action in actions:
            match action:
                case Regroup():
                    regroup = action
                case Plan():
                    if regroup is not None:
                        self._announce(self._generation(regroup, action, planned=planned))
                    elif self._running is not None:
                        self._tell_leader(self._running, action)
                case Pause(reason=reason):
                    self._pause(reason)
                    if self._is_overfull():  # whoever joins would make it worse
                        self._end(now_s, Ending(ok=False, why=reason))
                        return
                case Launch(kind=kind, reason=reason):
                    self._launch(now_s, self._num_missing(), reason, kind)
                case Drain(worker=worker, reason=reason, may_stay=may_stay):
                    if member := self._members.get(worker):
                        member.may_stay = may_stay
                        self._let_go(member, reason)
                case Stay():
                    pass
                case _:
                    assert_never(action)
        if any(isinstance(action, Drain | Launch) for action in actions):
            self._advance(now_s)

    def _generation(self, regroup: Regroup, plan: Plan, *, planned: bool) -> Generation:
        assert self._brain is not None
        store, batch = self._stores[regroup.roster[0]], self._brain.cluster.settings.batch
        return Generation(
            number=regroup.generation,
            roster=regroup.roster,
            shares=tuple(plan.shares[w] for w in regroup.roster),
            lr_factor=plan.lr_factor,
            lr_warmup_steps=batch.lr_warmup_steps,
            measures=batch.per_worker > 0 and batch.lr_rule == "adascale",
            # Where nobody trains, nobody can pass it on. The very first all begin as they get it.
            planned=planned and (self._running is not None or regroup.generation == 1),
            spares=self._spares(),
            saves=self._saver(regroup.roster),
            address=store.address,
            port=store.port,
            reason=regroup.reason,
        )

    def _announce(self, generation: Generation) -> None:
        log.info("generation %d: %s", generation.number, generation.reason)
        if self.terms.run and not generation.saves:
            log.warning("no worker sees %s: nobody writes checkpoints", self.terms.run)
        self._coming, self._paused, self._leaver_gone_s = generation, "", None
        at_once = msgspec.structs.replace(generation, planned=False)
        if not generation.planned:
            self._running = None
        for member in self._members.values():
            if member.trains or member.state is State.LEFT:
                if not generation.planned:
                    member.freed()
                # Nobody passes it on to a newcomer. One that was put off may have begun by its own
                # account, and then heeds nothing but what holds at once.
                is_new = self._running is not None and not member.begun
                self._outside.send(member.id, at_once if is_new else generation)

    def _force(self) -> None:
        """Who was to leave is gone already: the change cannot wait for a step's end any more."""
        self._leaver_gone_s = None
        if self._coming is not None and self._coming.planned:
            self._announce(msgspec.structs.replace(self._coming, planned=False))

    def _tell_leader(self, running: Generation, plan: Plan) -> None:
        shares = tuple(plan.shares[w] for w in running.roster)
        message = NewPlan(
            generation=plan.generation, shares=shares, lr_factor=plan.lr_factor, reason=plan.reason
        )
        self._outside.send(running.roster[0], message)

    def _begun(self, now_s: float) -> None:
        self._running, self._coming, self._leaver_gone_s = self._coming, None, None
        for member in self._members.values():
            member.freed()
            if self._in_running(member.id):
                member.begun, member.num_unmet = True, 0
            if member.state is State.LEFT:
                if self._running and member.id in self._running.spares:
                    log.info("%s stays as a spare", member.id)
                    member.state, member.begun, member.may_stay = State.SPARE, False, False
                else:
                    self._dismiss(member, member.leaves_because)
        self._advance(now_s)

    def _pause(self, reason: str) -> None:
        assert self._brain is not None
        log.warning("paused: %s", reason)
        self._running, self._coming, self._paused = None, None, reason
        for member in self._members.values():
            if member.trains:
                member.freed()
                self._outside.send(member.id, Paused(reason=reason))
            elif member.state is State.LEFT:
                self._dismiss(member, member.leaves_because)
        # Below the minimum, as many as lack; else one may be what the batch does not fit without.
        cluster = self._brain.cluster
        lacking = max(1, cluster.settings.workers.min - len(cluster.workers))
        self._call_spares(lacking - len(self._all_in(State.READY)), reason)

    def _let_go(self, member: Member, why: str) -> None:
        """A worker goes: at a step's end if it trains, else now."""
        if member.state in (State.IN, State.STARTING, State.READY, State.SPARE):
            log.info("draining %s: %s", member.id, why)
        if member.state is State.IN:
            member.state, member.leaves_because = State.ASKED, why
        elif member.state in (State.STARTING, State.READY, State.SPARE):
            self._dismiss(member, why)

    def _dismiss(self, member: Member, why: str) -> None:
        member.state = State.GONE
        self.crew.in_order.add(member.id)
        self._outside.send(member.id, Goodbye(why=why))

    # The end.

    def stop(self, now_s: float, why: str) -> None:
        """End the run in order: at a step's end, with a checkpoint."""
        if self._stopping or self.ending is not None:
            return
        log.info("stopping: %s", why)
        self._stopping, self._stopping_s = why, now_s
        for member in self._all_in(State.STARTING, State.READY):
            self._dismiss(member, "the run is ending")
        self._advance(now_s)
        self._settle(now_s)

    def close(self) -> None:
        """End the journal."""
        if self._brain is not None:
            self._brain.close()

    def _part(self, now_s: float) -> None:
        """The end is a change like others: planned, with nobody in its roster."""
        self._parting, self._stopping_s = True, now_s
        self._outside.keep({})  # whoever comes after must not take over workers that leave
        generation = Generation(
            number=self._number + 1,
            roster=(),
            shares=(),
            planned=self._running is not None and self._coming is None,
            saves=self._saver(self._roster),
            reason=self._stopping,
        )
        self._announce(generation)

    def _hurry(self) -> None:
        """The step at hand will not end: all leave at once."""
        if self._coming is not None and self._coming.planned:
            log.warning("the step at hand does not end: all leave at once")
            self._announce(
                msgspec.structs.replace(
                    self._coming,
                    number=self._coming.number + 1,
                    planned=False,
                    saves=self._saver(self._roster),
                )
            )

    def _settle(self, now_s: float) -> None:
        """See whether the run is over."""
        if self.ending is not None or self._away:
            return
        training = [m for m in self._members.values() if m.trains]
        if self._stopping:
            if not training:
                self._end(now_s, Ending(ok=True, why=f"stopped: {self._stopping}"))
        elif self._finishing:
            # A change that was announced but not passed on is not waited for.
            if not any(self._running is None or self._in_running(m.id) for m in training):
                self._end(now_s, Ending(ok=True, why="trained to the end"))
        elif self.crew.began and not self._anyone():
            self._end(now_s, Ending(ok=False, why=f"no worker is left; {self._last_loss}"))

    def _end(self, now_s: float, ending: Ending) -> None:
        if self.ending is not None:
            return
        log.info("the run ends: %s", ending.why)
        self.ending = ending
        if self._brain is not None:
            if self._brain.cluster.roster:
                everyone = Left(workers=self._brain.cluster.roster, cause=ending.why)
                self._brain.handle(now_s, everyone)  # so that a resumed run waits for none of them
            self._brain.close()
        for member in self._members.values():
            if member.state is not State.GONE and member.id != ending.worker:
                self._dismiss(member, ending.why)

    # Workers on their way.

    def _launch(self, now_s: float, num_workers: int, reason: str, kind: str = "") -> None:
        """Call spares back, and start processes for the rest."""
        num_workers -= self._call_spares(num_workers, reason, kind)
        if num_workers > 0:
            what = "worker" if num_workers == 1 else "workers"
            what += f" of kind {kind}" if kind else ""
            log.info("launching %d %s: %s", num_workers, what, reason)
        failures = self.crew.launch(num_workers, reason, kind, now_s)
        if failures:
            self._last_loss = f"a worker could not be started: {failures[0]}"
            self._reconcile(now_s, failures[0])

    def _call_spares(self, num_workers: int, reason: str, kind: str = "") -> int:
        """Let spares come back, as far as there are any; how many come."""
        if self._stopping or self._finishing or self.ending:
            return 0
        spares = [m for m in self._all_in(State.SPARE) if m.worker and kind in ("", m.worker.kind)]
        called = spares[: max(0, num_workers)]
        for member in called:
            log.info("%s comes back: %s", member.id, reason)
            member.state = State.READY
        return len(called)

    def _reconcile(self, now_s: float, cause: str) -> None:
        """Tell the brain of ordered workers that will not come."""
        missing = self._num_missing()
        if missing > 0:
            self._change(now_s, LaunchFailed(num_workers=missing, cause=cause), planned=True)
