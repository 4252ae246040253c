"""Who takes part in a run: messages into events, orders into messages.

A generation exists only if it is announced here. Numbers only grow, also over restarts. A planned
change is announced when the one before has begun; a loss never waits. There is no socket and no
clock in here: whoever drives it says what was heard and what time it is.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping
from itertools import count
from statistics import median
from typing import Any, assert_never

import msgspec

from evenstep.coordinate.brain import Brain, Timer
from evenstep.coordinate.crew import AGAIN, Crew, Exit, Meaning, told_of
from evenstep.coordinate.member import Ending, Member, Outside, State, Store, Terms
from evenstep.coordinate.overview import row, samples_per_s
from evenstep.coordinate.watch import PATIENCE_STEPS, overdue
from evenstep.errors import EvenstepError, InvalidInputError
from evenstep.messages import (
    Alive,
    Answer,
    Ask,
    Began,
    Done,
    Failed,
    FromClient,
    Generation,
    Goodbye,
    Hello,
    Lease,
    Leaving,
    NewPlan,
    Paused,
    Ready,
    Refused,
    Stepped,
    Stuck,
    Welcome,
)
from evenstep.ports import Launcher
from evenstep.types import (
    AnyAction,
    AnyEvent,
    Drain,
    DrainAsked,
    Joined,
    Launch,
    LaunchFailed,
    Left,
    Lost,
    Pause,
    Plan,
    Regroup,
    SizeAsked,
    Stay,
    StepDone,
    Worker,
    WorkerId,
    listed,
)

log = logging.getLogger("evenstep")

RECENT_STEPS = 20
LAST_WORDS_S = 1.0  # between a process's end and the end of its connection
OWN_LAG_S = 2.0  # after which it was us who did not listen


class Coordinator:
    """The membership of one run. Times are in seconds of the run's own clock."""

    def __init__(
        self,
        terms: Terms,
        outside: Outside,
        *,
        launcher: Launcher | None = None,
        timer: Timer = lambda: 0.0,
        names_from: int = 0,
    ) -> None:
        self.terms = terms
        self.crew = Crew(launcher, terms.restarts)
        self.ending: Ending | None = None
        self._outside, self._timer = outside, timer
        self._names = (f"w{n}" for n in count(names_from))
        self._brain: Brain | None = None
        self._members: dict[WorkerId, Member] = {}
        self._stores: dict[WorkerId, Store] = {}
        self._used: set[WorkerId] = set()  # ids that were ever in a roster
        self._running: Generation | None = None  # the one that trains
        self._coming: Generation | None = None  # announced, not begun
        self._paused = ""  # why
        self._stopping = ""  # why
        self._parting = False  # the end has been announced
        self._finishing = False  # someone has trained to the end
        self._ready_s: float | None = None  # when the first worker was
        self._leaver_gone_s: float | None = None  # before the generation without it began
        self._ticked_s: float | None = None
        # After a restart: who is not back yet, who is back in an older generation, who is gone.
        self._away: set[WorkerId] = set()
        self._behind: set[WorkerId] = set()
        self._missing: dict[WorkerId, str] = {}
        self._lease_until_s = 0.0
        self._step = -1
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)  # samples, seconds
        self._last_loss = "none came"

    # From the server.

    def admit(self, now_s: float, hello: Hello) -> Welcome | Refused:
        """Take a worker's first words. `arrived` follows when the answer is on its way."""
        if self.ending or self._stopping or self._finishing:
            return Refused(why="the run is ending")
        member = Member(id=hello.worker, host=hello.host, pid=hello.pid, heard_s=now_s)
        if hello.worker in self._away and hello.generation <= self._number:
            member.state, member.begun = State.IN, True
            if hello.generation < self._number:
                self._behind.add(hello.worker)
        elif hello.generation > 0:
            return Refused(
                why=f"{hello.worker} of generation {hello.generation} is not in the run, which is "
                f"at {self._number}; it can join as a new worker"
            )
        elif hello.worker not in self.crew.running and self._num_taking_part() >= self.terms.most:
            return Refused(why=f"the run has {self.terms.most} workers and wants no more")
        elif not hello.worker or hello.worker in self._members or hello.worker in self._used:
            member.id = self._free_name()
        self._members[member.id] = member
        return Welcome(
            worker=member.id,
            lease_s=self.terms.lease_s,
            run=self.terms.run,
            checkpoint_every_s=self.terms.checkpoint_every_s,
            checkpoints_kept=self.terms.checkpoints_kept,
            resume=self._outside.checkpoint(),
        )

    def arrived(self, now_s: float, worker: WorkerId) -> None:
        """A worker that was admitted can be spoken to."""
        if worker in self._away:
            self._away.discard(worker)
            if not self._away:
                self._take_over(now_s)

    def heard(self, now_s: float, worker: WorkerId, message: FromClient) -> None:
        """A worker said something. InvalidInputError: it cannot be true, and nothing changed."""
        member = self._members.get(worker)
        if member is None:
            return
        member.heard_s = now_s
        if isinstance(message, Alive):
            self._alive(now_s, member, message)
        elif self.ending is None:
            self._listen(now_s, member, message)
            self._settle(now_s)

    def closed(self, now_s: float, worker: WorkerId) -> None:
        """A worker's connection has ended."""
        member = self._members.get(worker)
        if member is None:
            return
        self._part_with(now_s, member, "its connection closed", dead=False)
        if worker in self.crew.exits:
            self._judge(now_s, worker)
        self._settle(now_s)

    def tick(self, now_s: float) -> None:
        """Time passes: to be called about twice a second."""
        if self.ending is not None:
            return
        if self._ticked_s is not None and now_s - self._ticked_s > OWN_LAG_S:
            for member in self._members.values():
                member.forgive(now_s, now_s - self._ticked_s)
        self._ticked_s = now_s
        if self._away and now_s >= self._lease_until_s:
            self._missing |= dict.fromkeys(self._away, "it did not come back within the lease")
            self._away.clear()
            self._take_over(now_s)
        for worker, exit in list(self.crew.exits.items()):
            if now_s - exit.at_s > LAST_WORDS_S:
                self._judge(now_s, worker)
        if self._leaver_gone_s is not None and now_s - self._leaver_gone_s > self.terms.silent_s:
            self._force()
        self._watch(now_s)
        self._advance(now_s)
        self._settle(now_s)

    # From the launcher, and to it.

    def start(self, now_s: float, num_workers: int) -> None:
        """Launch the first workers."""
        self._launch(now_s, num_workers, "asked for")
        self._settle(now_s)

    def new_name(self) -> WorkerId:
        """For a worker that is being launched. No name is given twice."""
        name = self._free_name()
        self.crew.add(name)
        return name

    def never_joined(self) -> set[WorkerId]:
        """Launched workers that were in no roster yet."""
        return self.crew.running - self._used

    def ended(self, now_s: float, worker: WorkerId, code: int, said: str = "") -> None:
        """A launched process has ended; a negative code is a signal. `said` is its last output."""
        self.crew.running.discard(worker)
        if self.ending is not None:
            if self.ending.ok and worker in self._used and code > 0 and code != AGAIN:
                why = f"{worker} {told_of(code, joined=True)}"
                self.ending = Ending(ok=False, why=why, told=said, worker=worker)
            return
        self.crew.exits[worker] = Exit(code, said, now_s)
        if code < 0 or worker not in self._members:
            self._judge(now_s, worker)
        # Else its last words may be on their way: the end of its connection, or a tick, will judge.
        self._settle(now_s)

    # From operators.

    def ask(self, now_s: float, ask: Ask) -> Answer:
        """Do what an operator asks for, and tell."""
        try:
            match ask.what:
                case "status":
                    return Answer(told=self.status())
                case "scale":
                    return Answer(told=self._scale(now_s, ask.num_workers))
                case "drain":
                    return Answer(told=self._drain(now_s, ask.worker))
                case "stop":
                    self.stop(now_s, "an operator asked for it")
                    return Answer()
        except EvenstepError as e:
            return Answer(problem=str(e))
        return Answer(problem=f"cannot do {ask.what!r}; known: status, scale, drain, stop")

    def stop(self, now_s: float, why: str) -> None:
        """End the run in order: at a step's end, with a checkpoint."""
        if self._stopping or self.ending is not None:
            return
        log.info("stopping: %s", why)
        self._stopping = why
        for member in self._members.values():
            if member.state in (State.STARTING, State.READY):
                self._dismiss(member, "the run is ending")
        self._advance(now_s)
        self._settle(now_s)

    def fail(self, now_s: float, why: str, told: str = "", worker: WorkerId = "") -> None:
        """End the run at once."""
        self._end(now_s, Ending(ok=False, why=why, told=told, worker=worker))

    def close(self) -> None:
        """End the journal."""
        if self._brain is not None:
            self._brain.close()

    def status(self) -> dict[str, Any]:
        """The run as people want to see it."""
        cluster = self._brain.cluster if self._brain else None
        roster = self._running.roster if self._running else cluster.roster if cluster else ()
        rank = {worker: i for i, worker in enumerate(roster)}
        ids = dict.fromkeys((*roster, *self._members, *sorted(self.crew.running)))
        return {
            "run": self.terms.run,
            "state": self._state(),
            "reason": self._paused or self._stopping,
            "generation": self._running.number if self._running else self._number,
            "step": self._step,
            "samples_per_s": samples_per_s(self._recent),
            "restarts_left": self.crew.restarts_left,
            "settings": msgspec.to_builtins(cluster.settings) if cluster else {},
            "workers": [row(w, self._members.get(w), rank.get(w), self._state_of(w)) for w in ids],
        }

    # Going on after a restart.

    def restore(
        self,
        now_s: float,
        brain: Brain,
        *,
        used: Collection[WorkerId],
        stores: Mapping[WorkerId, Store],
        ended: Collection[WorkerId] = (),
    ) -> None:
        """Go on with a run. Its members may come back until the lease is over.

        `ended` are workers whose processes are known to be gone.
        """
        self._brain = brain
        self._used.update(used)
        self._stores.update(stores)
        self._step = brain.cluster.step
        self._reconcile(now_s, "the coordinator was restarted")
        for worker in brain.cluster.roster:
            if worker in ended:
                self._missing[worker] = "it ended with the coordinator"
            elif worker not in stores:
                self._missing[worker] = "nobody knows where it is"
            else:
                self._away.add(worker)
        self._lease_until_s = now_s + self.terms.lease_s
        if not self._away:
            self._take_over(now_s)

    def _give_up(self, now_s: float, worker: WorkerId, why: str) -> bool:
        """Do not wait for a member to come back."""
        if worker not in self._away:
            return False
        self._away.discard(worker)
        self._missing[worker] = why
        if not self._away:
            self._take_over(now_s)
        return True

    def _take_over(self, now_s: float) -> None:
        """All members are back, or will not come."""
        assert self._brain is not None
        cluster = self._brain.cluster
        missing, self._missing = self._missing, {}
        behind, self._behind = self._behind, set()
        if missing:
            self._lose(now_s, missing)
        elif cluster.plan is not None:
            regroup = Regroup(
                generation=cluster.generation, roster=cluster.roster, reason="announced again"
            )
            newest = self._generation(regroup, cluster.plan, planned=False)
            if behind:
                self._coming = newest
                for worker in behind:
                    self._outside.send(worker, newest)
            else:
                self._running = newest
        elif cluster.roster:
            self._pause("too few workers")
        self._advance(now_s)

    # What workers say.

    def _listen(self, now_s: float, member: Member, message: FromClient) -> None:
        match message:
            case Ready():
                self._ready(now_s, member, message)
            case Began(generation=number, step=step):
                if self._leads(member, self._coming, number):
                    log.info("generation %d began at step %d", number, step)
                    self._begun(now_s)
            case Stepped():
                self._stepped(now_s, member, message)
            case Stuck(generation=number, waited_s=waited_s):
                member.generation = number
                if member.stuck_s is None:
                    member.stuck_s = now_s
                if member.waiting_since_s is None:
                    member.waiting_since_s = now_s - waited_s
                self._unblock(now_s)
            case Leaving(why=why):
                self._let_go(member, why)
                self._advance(now_s)
            case Done(step=step):
                self._done(member, step)
            case Failed(told=told):
                self.fail(now_s, f"the script failed on {member.id}", told, member.id)
            case Alive() | Hello() | Ask():
                pass  # dealt with before, or out of place
            case _:
                assert_never(message)

    def _alive(self, now_s: float, member: Member, alive: Alive) -> None:
        if not alive.waiting:
            member.freed()
        elif member.waiting_since_s is None:
            member.waiting_since_s = now_s
        member.alive_s, member.waiting = now_s, alive.waiting
        member.generation = alive.generation
        self._outside.send(member.id, Lease())

    def _ready(self, now_s: float, member: Member, ready: Ready) -> None:
        try:
            worker = Worker(id=member.id, kind=ready.kind, cores=ready.cores, cap=ready.cap)
            if self._brain is None:
                journal = self._outside.journal
                self._brain = Brain.begin(ready, self.terms.sets, journal, self._timer)
            problem = self._brain.differs(ready)
        except EvenstepError as e:
            problem = str(e)
        if problem:
            log.warning("%s is refused: %s", member.id, problem)
            self.crew.refused[member.id] = problem
            del self._members[member.id]
            self._outside.send(member.id, Refused(why=problem))
            self._outside.hang_up(member.id)
            return
        self._stores[member.id] = Store(ready.address, ready.port)
        if member.state is State.STARTING:
            member.state, member.worker = State.READY, worker
            if self._ready_s is None:
                self._ready_s = now_s
            self._advance(now_s)

    def _done(self, member: Member, step: int) -> None:
        others = any(m.trains for m in self._members.values() if m is not member)
        if others and member.state in (State.STARTING, State.READY):
            self._dismiss(member, "it had nothing to do")
            return
        member.state = State.DONE
        self._finishing, self._step = True, max(self._step, step)

    def _stepped(self, now_s: float, member: Member, message: Stepped) -> None:
        done = StepDone(
            step=message.step,
            generation=message.generation,
            seconds=message.seconds,
            reports=message.reports,
        )
        if self._leads(member, self._coming, message.generation):
            self._begun(now_s)
        if self._brain is None or not self._leads(member, self._running, message.generation):
            return
        self._step = message.step
        self._recent.append((sum(r.samples for r in message.reports), message.seconds))
        for report in message.reports:
            if other := self._members.get(report.worker):
                other.freed()
                other.has_stepped, other.share = True, report.samples
                other.compute_s, other.wait_s = report.compute_s, report.wait_s
        self._obey(now_s, self._brain.step(now_s, done), planned=True)

    # Changes.

    def _advance(self, now_s: float) -> None:
        """Make the next planned change, unless one is under way."""
        while self._brain and not (self._coming or self._away or self._finishing or self.ending):
            ready = [m for m in self._members.values() if m.state is State.READY]
            asked = [m for m in self._members.values() if m.state is State.ASKED]
            if self._stopping:
                self._part()
                return
            if ready and not self._gathers(now_s):
                self._take_in(now_s, ready)
            elif asked and len(asked) == len(self._roster):
                self.stop(now_s, f"all workers leave: {asked[0].leaves_because}")
            elif asked:
                for member in asked:
                    member.state = State.LEFT
                ids = tuple(m.id for m in asked)
                self._change(now_s, Left(workers=ids, cause=asked[0].leaves_because), planned=True)
            else:
                return

    def _take_in(self, now_s: float, ready: list[Member]) -> None:
        ready.sort(key=lambda m: (len(m.id), m.id))  # w2 before w10, whoever was ready first
        for member in ready:
            member.state = State.IN
            self._used.add(member.id)
        self._outside.keep(self._stores)
        workers = tuple(m.worker for m in ready if m.worker is not None)
        self._change(now_s, Joined(workers=workers), planned=True)

    def _gathers(self, now_s: float) -> bool:
        """Whether the first workers are still waited for, so that they begin together."""
        if self._ready_s is None or (self._brain and self._brain.cluster.roster):
            return False
        starting = any(not self._is(w, State.READY) for w in self._on_the_way())
        return starting and now_s - self._ready_s < self.terms.gather_s

    def _lose(self, now_s: float, lost: Mapping[WorkerId, str]) -> None:
        """Workers are gone: the others go on without them, at once."""
        left = False
        for worker, cause in lost.items():
            log.warning("%s is lost: %s", worker, cause)
            self._last_loss = f"{worker} was lost: {cause}"
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
            self._go_on(now_s, known)
        elif left:
            self._force()

    def _part_with(self, now_s: float, member: Member, why: str, *, dead: bool) -> None:
        """A connection or its process has ended: a loss, unless nothing more was expected."""
        if member.trains and self.ending is None and (dead or not self._parting):
            self._lose(now_s, {member.id: why})
            return
        del self._members[member.id]
        if member.trains or member.state in (State.LEFT, State.DONE):
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

    def _put_off(self) -> tuple[WorkerId, ...]:
        """Workers that were to join, and join later: a change at once finds others within a step.

        What those may still have to add up in it, somebody who has not begun cannot.
        """
        training = [m for m in self._members.values() if m.trains]
        if not any(m.begun for m in training):
            return ()
        newcomers = [m for m in training if not m.begun]
        for member in newcomers:
            if member.state is State.IN:
                member.state = State.READY
            else:
                self._dismiss(member, member.leaves_because)
        return tuple(m.id for m in newcomers)

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
                case Launch(reason=reason):
                    self._launch(now_s, self._num_missing(), reason)
                case Drain(worker=worker, reason=reason):
                    if member := self._members.get(worker):
                        self._let_go(member, reason)
                case Stay():
                    pass
                case _:
                    assert_never(action)
        if any(isinstance(action, Drain) for action in actions):
            self._advance(now_s)

    def _generation(self, regroup: Regroup, plan: Plan, *, planned: bool) -> Generation:
        store = self._stores[regroup.roster[0]]
        return Generation(
            number=regroup.generation,
            roster=regroup.roster,
            shares=tuple(plan.shares[w] for w in regroup.roster),
            # Where nobody trains, nobody can pass it on. The very first all begin as they get it.
            planned=planned and (self._running is not None or regroup.generation == 1),
            address=store.address,
            port=store.port,
            reason=regroup.reason,
        )

    def _announce(self, generation: Generation) -> None:
        log.info("generation %d: %s", generation.number, generation.reason)
        self._coming, self._paused, self._leaver_gone_s = generation, "", None
        if not generation.planned:
            self._running = None
        for member in self._members.values():
            if member.trains or member.state is State.LEFT:
                if not generation.planned:
                    member.freed()
                self._outside.send(member.id, generation)

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
            member.begun |= self._in_running(member.id)
            if member.state is State.LEFT:
                self._dismiss(member, member.leaves_because)
        self._advance(now_s)

    def _pause(self, reason: str) -> None:
        log.warning("paused: %s", reason)
        self._running, self._coming, self._paused = None, None, reason
        for member in self._members.values():
            if member.trains:
                member.freed()
                self._outside.send(member.id, Paused(reason=reason))
            elif member.state is State.LEFT:
                self._dismiss(member, member.leaves_because)

    def _let_go(self, member: Member, why: str) -> None:
        """A worker goes: at a step's end if it trains, else now."""
        if member.state is State.IN:
            member.state, member.leaves_because = State.ASKED, why
        elif member.state in (State.STARTING, State.READY):
            self._dismiss(member, why)

    def _dismiss(self, member: Member, why: str) -> None:
        member.state = State.GONE
        self.crew.in_order.add(member.id)
        self._outside.send(member.id, Goodbye(why=why))

    # The end.

    def _part(self) -> None:
        """The end is a change like others: planned, with nobody in its roster."""
        self._parting = True
        self._outside.keep({})  # whoever comes after must not take over workers that leave
        generation = Generation(
            number=self._number + 1,
            roster=(),
            shares=(),
            planned=self._running is not None,
            reason=self._stopping,
        )
        self._announce(generation)

    def _hurry(self) -> None:
        """Someone was lost while all leave: the step at hand will not end."""
        if self._coming is not None and self._coming.planned:
            later = self._coming.number + 1
            self._announce(msgspec.structs.replace(self._coming, number=later, planned=False))

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
            self.fail(now_s, f"no worker is left; {self._last_loss}")

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

    # Who holds the others up.

    def _watch(self, now_s: float) -> None:
        there = [m for m in self._members.values() if m.state is not State.DONE]
        patience_s = self._patience_s()
        if self._finishing or self._parting:
            limit_s = self.terms.silent_s + patience_s  # the others may be gone, and not complain
            late = [m for m in there if m.trains and now_s - m.heard_s > limit_s]
            blamed = {m.id: "silent while the others end" for m in late}
        else:
            generation = self._watched()
            roster = [m for m in there if generation and m.id in generation.roster]
            blamed = overdue(
                roster,
                now_s,
                silent_s=self.terms.silent_s,
                patience_s=patience_s,
                lease_s=self.terms.lease_s,
            )
        for worker, why in blamed.items():
            self._outside.send(worker, Goodbye(why=why))
            self._outside.hang_up(worker)
            self.crew.evict(worker)
        if blamed:
            self._lose(now_s, blamed)

    def _watched(self) -> Generation | None:
        """The generation that the workers are in, or on their way into."""
        coming, running = self._coming, self._running
        if running is None or coming is None:
            return running or coming
        there = [self._members[w] for w in running.roster if w in self._members]
        return coming if any(m.generation == coming.number for m in there) else running

    def _unblock(self, now_s: float) -> None:
        """Someone is stuck. Those who are known to be gone are not waited for any longer."""
        if self._leaver_gone_s is not None:
            self._force()
        elif self._finishing:
            self._go_on(now_s, {})
        elif self._parting and any(not self._trains(w) for w in self._roster):
            self._hurry()
        else:
            self._watch(now_s)

    def _patience_s(self) -> float:
        steps_s = [seconds for _, seconds in self._recent]
        return max(self.terms.patience_s, PATIENCE_STEPS * median(steps_s or [0.0]))

    # Processes.

    def _judge(self, now_s: float, worker: WorkerId) -> None:
        """What the end of a launched process means."""
        exit = self.crew.exits.pop(worker)
        joined = worker in self._used
        told = told_of(exit.code, joined=joined)
        why = f"{worker} {told}"
        self._give_up(now_s, worker, f"it {told}")
        if member := self._members.get(worker):
            self._outside.hang_up(worker)
            self._part_with(now_s, member, f"it {told}", dead=True)
        alone = not any(m.trains for m in self._members.values())
        match self.crew.meaning(worker, exit.code, joined=joined, alone=alone):
            case Meaning.FINE:
                self._reconcile(now_s, why)
            case Meaning.FAILURE:
                refused = self.crew.refused.get(worker)
                why = f"{worker} was refused: {refused}" if refused else why
                self.fail(now_s, why, exit.said, worker)
            case Meaning.REPLACE | Meaning.MISSING as meaning:
                log.warning("%s", why)
                self._last_loss = why
                replaced = meaning is Meaning.REPLACE and self.crew.restarts_left > 0
                if replaced and not (self._stopping or self._finishing or self.ending):
                    self.crew.restarts_left -= 1
                    self._launch(now_s, 1, f"in place of {worker}")
                else:
                    self._reconcile(now_s, why)

    def _launch(self, now_s: float, num_workers: int, reason: str) -> None:
        failures = self.crew.launch(num_workers, reason)
        if failures:
            self._last_loss = f"a worker could not be started: {failures[0]}"
            self._reconcile(now_s, failures[0])

    def _reconcile(self, now_s: float, cause: str) -> None:
        """Tell the brain of ordered workers that will not come."""
        missing = self._num_missing()
        if missing > 0:
            self._change(now_s, LaunchFailed(num_workers=missing, cause=cause), planned=True)

    def _num_missing(self) -> int:
        """Workers that the brain has ordered and nobody has launched."""
        ordered = self._brain.cluster.launching if self._brain else 0
        return ordered - len(self._on_the_way())

    def _on_the_way(self) -> set[WorkerId]:
        """Launched workers that are to join, and have not."""
        crew = self.crew
        return crew.running - (crew.in_order | crew.evicted | crew.refused.keys() | self._used)

    # What operators ask for.

    def _scale(self, now_s: float, num_workers: int) -> dict[str, Any]:
        least, most = self.terms.least, self.terms.most
        if not least <= num_workers <= most:
            raise InvalidInputError(
                "scale", f"this run has {least} to {most} workers, got {num_workers}"
            )
        brain = self._open_brain("scale")
        self._change(now_s, SizeAsked(num_workers=num_workers), planned=True)
        return {"num_workers": brain.cluster.target}

    def _drain(self, now_s: float, worker: WorkerId) -> dict[str, Any]:
        if self._give_up(now_s, worker, "an operator gave it up"):
            return {}
        member = self._members.get(worker)
        if member is None:
            there = listed(list(self._members)) or "none"
            raise InvalidInputError("drain", f"no worker {worker}; there are {there}")
        if member.state is State.IN:
            cluster = self._open_brain("drain").cluster
            least = cluster.settings.workers.min
            staying = sum(self._is(w, State.IN) for w in cluster.roster) - 1
            if staying < least:
                raise InvalidInputError(
                    "drain", f"{staying} of at least {least} workers would be left; stop the run"
                )
            self._change(now_s, DrainAsked(worker=worker), planned=True)
        else:
            self._let_go(member, "asked for")
        return {}

    def _open_brain(self, what: str) -> Brain:
        if self._brain is None:
            raise InvalidInputError(what, "no worker is ready yet; ask again")
        if self._stopping or self._finishing or self.ending:
            raise InvalidInputError(what, "the run is ending")
        return self._brain

    # Small questions.

    @property
    def _number(self) -> int:
        return self._brain.cluster.generation if self._brain else 0

    @property
    def _roster(self) -> tuple[WorkerId, ...]:
        return self._brain.cluster.roster if self._brain else ()

    def _is(self, worker: WorkerId, state: State) -> bool:
        member = self._members.get(worker)
        return member is not None and member.state is state

    def _trains(self, worker: WorkerId) -> bool:
        member = self._members.get(worker)
        return member is not None and member.trains

    def _in_running(self, worker: WorkerId) -> bool:
        return self._running is not None and worker in self._running.roster

    def _leads(self, member: Member, generation: Generation | None, number: int) -> bool:
        if generation is None or generation.number != number:
            return False
        return generation.roster[:1] == (member.id,)

    def _anyone(self) -> bool:
        """Whether anybody is there of whom something can be expected."""
        connected = any(m.state is not State.GONE for m in self._members.values())
        return connected or bool(self.crew.running - self.crew.in_order or self.crew.exits)

    def _num_taking_part(self) -> int:
        early = (State.STARTING, State.READY)
        return sum(m.trains or m.state in early for m in self._members.values())

    def _free_name(self) -> WorkerId:
        taken = self._used | self._members.keys() | self.crew.running
        return next(name for name in self._names if name not in taken)

    def _state(self) -> str:
        for state, holds in (
            ("ended", self.ending),
            ("stopping", self._stopping),
            ("finishing", self._finishing),
            ("waiting for workers to come back", self._away),
            ("paused", self._paused),
            ("training", self._running),
            ("regrouping", self._coming),
        ):
            if holds:
                return state
        return "starting"

    def _state_of(self, worker: WorkerId) -> str:
        if worker in self._away:
            return "away"
        member = self._members.get(worker)
        if member is None:
            return "starting" if worker in self.crew.running - self._used else "gone"
        return "stuck" if member.stuck_s is not None else member.state.value
