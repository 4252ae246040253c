"""Who takes part in a run: messages into events, orders into messages.

There is no socket and no clock in here: whoever drives it says what was heard, of whom, and what
time it is.
"""

from __future__ import annotations

import logging
from itertools import count
from typing import assert_never

from msgspec.structs import replace

from evenstep.coordinate.brain import Brain, Timer
from evenstep.coordinate.crew import ABORTED, Exit, Meaning, told_of
from evenstep.coordinate.member import Ending, Member, Outside, State, Store, Terms
from evenstep.coordinate.patience import Patience
from evenstep.errors import BatchBoundsError, EvenstepError
from evenstep.messages import (
    Alive,
    Ask,
    Began,
    Done,
    Failed,
    FromClient,
    Generation,
    Hello,
    Lease,
    Leaving,
    Ready,
    Refused,
    Stepped,
    Stuck,
    Welcome,
)
from evenstep.ports import Launcher
from evenstep.types import DrainAsked, SizeAsked, StepDone, Steps, Worker, WorkerId

log = logging.getLogger("evenstep")

EARLY = (State.STARTING, State.READY)
LAST_WORDS_S = 1.0  # between a process's end and the end of its connection


class Coordinator(Patience):
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
        super().__init__(terms, outside, launcher)
        self._timer = timer
        self._names = (f"w{n}" for n in count(names_from))

    # From the server.

    def admit(self, now_s: float, hello: Hello) -> Welcome | Refused:
        """Take a worker's first words. `arrived` follows when the answer is on its way."""
        if self.ending or self._stopping or self._finishing:
            return Refused(why="the run is ending")
        member = Member(id=hello.worker, host=hello.host, pid=hello.pid, heard_s=now_s)
        if hello.worker in self._away and hello.generation <= self._number:
            member.state, member.begun = State.IN, True
            member.worker = self._brain.cluster.workers[member.id] if self._brain else None
            if hello.generation < self._number:
                self._behind.add(hello.worker)
        elif hello.generation > 0:
            return Refused(
                why=f"{hello.worker} of generation {hello.generation} is not in the run, which is "
                f"at {self._number}; it can join as a new worker"
            )
        elif hello.worker not in self.crew.running and self._num_taking_part() >= self._most:
            return Refused(why=f"the run has room for {self._most} workers, and they are there")
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
            underway=self._running is not None,
        )

    def arrived(self, now_s: float, worker: WorkerId) -> None:
        """A worker that was admitted can be spoken to."""
        if worker in self._away:
            self._away.discard(worker)
            if not self._away:
                self._take_over(now_s)

    def heard(self, now_s: float, worker: WorkerId, message: FromClient) -> None:
        """A worker said something. InvalidInputError: it cannot be true, and nothing changed."""
        self._look_at_the_clock(now_s)
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
        self._look_at_the_clock(now_s)
        if self._away and now_s >= self._lease_until_s:
            self._missing |= dict.fromkeys(self._away, "it did not come back within the lease")
            self._away.clear()
            self._take_over(now_s)
        for worker, exit in list(self.crew.exits.items()):
            if now_s - exit.at_s > LAST_WORDS_S:
                self._judge(now_s, worker)
        if self._leaver_gone_s is not None and now_s - self._leaver_gone_s > self.terms.silent_s:
            self._force()
        starting = {w for w in self._on_the_way() if not self._is(w, State.READY)}
        for worker in self.crew.late(now_s, self.terms.start_s, starting):
            log.warning("%s is not ready %g s after its start", worker, self.terms.start_s)
            self.crew.evict(worker)
        self._watch(now_s)
        self._advance(now_s)
        self._settle(now_s)

    def fail(self, now_s: float, why: str, told: str = "", worker: WorkerId = "") -> None:
        """End the run at once."""
        self._end(now_s, Ending(ok=False, why=why, told=told, worker=worker))

    # From the launcher, and to it.

    def start(self, now_s: float, num_workers: int, asked: bool = False) -> None:
        """Launch the first workers; of a run that goes on, as many as it lacks.

        There the size that it last was to have counts, unless `num_workers` is `asked` for now.
        """
        target = self._brain.cluster.target if self._brain else 0
        if num_workers > self._most:
            log.warning("the run has room for %d workers, not for %d", self._most, num_workers)
            num_workers = self._most
        here = self.crew.running - self.crew.in_order
        if target and not asked:
            self._launch(now_s, target - len(here | self._away), "asked for")
        else:
            self._launch(now_s, num_workers - len(here), "asked for")
            if num_workers and target not in (0, num_workers):
                self._change(now_s, SizeAsked(num_workers=num_workers), planned=True)
        self._settle(now_s)

    def new_name(self) -> WorkerId:
        """For a worker that is being launched. No name is given twice."""
        name = self._free_name()
        self.crew.add(name)
        return name

    def never_joined(self) -> set[WorkerId]:
        """Launched workers that were in no roster yet."""
        return self.crew.running - self._used

    def dying(self, now_s: float, worker: WorkerId, number: int) -> None:
        """A signal ends a launched process. Its connection may stay open until its memory is gone.

        The others need not wait for that, of many gigabytes or on a card.
        """
        member = self._members.get(worker)
        if member is not None and self.ending is None:
            self._outside.hang_up(worker)
            self._part_with(now_s, member, f"it {told_of(-number, joined=True)}", dead=True)
            self._settle(now_s)

    def ended(self, now_s: float, worker: WorkerId, code: int, said: str = "") -> None:
        """A launched process has ended; a negative code is a signal. `said` is its last output."""
        self.crew.running.discard(worker)
        if self.ending is not None:
            if self.ending.ok and worker in self._used and self.crew.fails_late(worker, code):
                why = f"{worker} {told_of(code, joined=True)}"
                log.warning("%s, after the run", why)
                if code != ABORTED:
                    self.ending = Ending(ok=False, why=why, told=said, worker=worker)
            return
        self.crew.exits[worker] = Exit(code, said, now_s)
        if code < 0 or worker not in self._members:
            self._judge(now_s, worker)
        # Else its last words may be on their way: the end of its connection, or a tick, will judge.
        self._settle(now_s)

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
                self._stuck(now_s, member, number, waited_s)
            case Leaving(why=why):
                trains = member.state is State.IN
                self._let_go(member, why)
                if trains:  # the brain must not count on it any more
                    self._change(now_s, DrainAsked(worker=member.id), planned=True)
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
        member.alive_s, member.waiting, member.apart = now_s, alive.waiting, alive.apart
        member.generation = alive.generation
        self._outside.send(member.id, Lease())

    def _stuck(self, now_s: float, member: Member, number: int, waited_s: float) -> None:
        member.generation = number
        watched = self._watched()
        if watched is not None and watched.number == number:  # else it will have heard by now
            if member.stuck_s is None:
                member.stuck_s = now_s
            if member.waiting_since_s is None:
                member.waiting_since_s = now_s - waited_s
        self._unblock(now_s)

    def _ready(self, now_s: float, member: Member, ready: Ready) -> None:
        try:
            worker = Worker(
                id=member.id,
                kind=ready.kind,
                cores=ready.cores,
                cap=ready.cap,
                price_per_hour=self.terms.price_of(ready.kind),
            )
            if self._brain is None:
                journal = self._outside.journal
                self._brain = Brain.begin(
                    ready,
                    self.terms.sets,
                    journal,
                    self._timer,
                    num_workers=len(self._on_the_way()),
                )
            problem = self._brain.differs(ready) or self._too_many(member)
        except BatchBoundsError as e:  # nobody who joins can help: it would pause for ever
            self.fail(now_s, str(e))
            return
        except EvenstepError as e:
            problem = str(e)
        if problem:
            log.warning("%s is refused: %s", member.id, problem)
            self.crew.refused[member.id] = problem
            del self._members[member.id]
            self._outside.send(member.id, Refused(why=problem))
            self._outside.hang_up(member.id)
            return
        self._stores[member.id] = Store(ready.address, ready.port, ready.sees_folder)
        if member.state is State.STARTING:
            member.state, member.worker = State.READY, worker
            if self._ready_s is None:
                self._ready_s = now_s
            self._advance(now_s)

    def _done(self, member: Member, step: int) -> None:
        others = any(m.trains for m in self._members.values() if m is not member)
        if others and member.state in (State.STARTING, State.READY, State.SPARE):
            self._dismiss(member, "it had nothing to do")
            return
        member.state = State.DONE
        self.trained.add(member.id)
        self._finishing, self._step = True, max(self._step, step)

    def _stepped(self, now_s: float, member: Member, message: Stepped) -> None:
        done = StepDone(
            step=message.step,
            generation=message.generation,
            seconds=message.seconds,
            reports=message.reports,
            grad_squared_norm=message.grad_squared_norm,
            quiet=message.quiet,
            position=message.position,
        )
        if self._leads(member, self._coming, message.generation):
            self._begun(now_s)
        if self._brain is None or not self._leads(member, self._running, message.generation):
            return
        self._step, self._num_meetings = message.step, 0
        self._steps_s.append(message.seconds)
        self._throughput.add(now_s, done.generation, _own_steps(done, self._brain.cluster.batch))
        for report in message.reports:
            if other := self._members.get(report.worker):
                other.freed()
                other.has_stepped, other.share = True, report.samples
                other.compute_s, other.wait_s = report.compute_s, report.wait_s
        self._obey(now_s, self._brain.step(now_s, done), planned=True)

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
                if self.crew.fails_late(worker, exit.code):
                    log.warning("%s; nothing more was expected of it", why)
                self._reconcile(now_s, why)
            case Meaning.FAILURE:
                refused = self.crew.refused.get(worker)
                why = f"{worker} was refused: {refused}" if refused else why
                self.fail(now_s, why, exit.said, worker)
            case Meaning.REPLACE | Meaning.MISSING as meaning:
                log.warning("%s", why)
                self._last_loss = why
                place = f"in place of {worker}"
                wanted = meaning is Meaning.REPLACE and worker not in self.crew.relieved
                wanted &= not (self._stopping or self._finishing or self.ending)
                # One that the brain has ordered and that never came is its to order again.
                wanted &= joined or self._num_missing() <= 0
                if wanted and not self._call_spares(1, place) and self.crew.restarts_left > 0:
                    self.crew.restarts_left -= 1
                    self._launch(now_s, 1, place)
                self._reconcile(now_s, why)
        self._advance(now_s)  # who is to leave may have waited for it to come

    # Small questions.

    def _leads(self, member: Member, generation: Generation | None, number: int) -> bool:
        if generation is None or generation.number != number:
            return False
        return generation.roster[:1] == (member.id,)

    def _too_many(self, member: Member) -> str:
        """Reason to refuse a joiner admitted before the batch size was known; empty if it fits."""
        if member.state not in EARLY or member.id in self.crew.running:
            return ""
        come = {m.id for m in self._members.values() if m.trains or m.state in EARLY}
        if len(come | self._on_the_way()) <= self._most:
            return ""
        return f"the run has room for {self._most} workers, and they are there"

    def _num_taking_part(self) -> int:
        return sum(m.trains or m.state in EARLY for m in self._members.values())

    def _free_name(self) -> WorkerId:
        taken = self._used | self._members.keys() | self.crew.running
        return next(name for name in self._names if name not in taken)


def _own_steps(done: StepDone, batch: int) -> Steps:
    """The reported steps, with quiet samples capped to this generation's own."""
    quiet = done.quiet
    own = replace(quiet, samples=min(quiet.samples, quiet.num * batch))
    return replace(done, quiet=own).steps
