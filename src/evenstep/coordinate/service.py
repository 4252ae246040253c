"""The coordinator as a service: membership with its sockets, clock, run folder and processes."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, assert_never

from msgspec.structs import replace

from evenstep.config import Settings
from evenstep.coordinate import events as ev
from evenstep.coordinate.addresses import EVERYWHERE, outward_address, spell
from evenstep.coordinate.brain import Brain
from evenstep.coordinate.coordinator import Coordinator
from evenstep.coordinate.events import Ending, Terms
from evenstep.coordinate.operators import status
from evenstep.coordinate.record import MembershipRecorder
from evenstep.coordinate.run_folder import RunFolder
from evenstep.coordinate.salvage import last_term, restore
from evenstep.coordinate.server import Server
from evenstep.coordinate.state import RunState
from evenstep.coordinate.steps import tell_faulty
from evenstep.coordinate.term import TERM, Claim, TermOverError
from evenstep.journal import Journal
from evenstep.messages import Answer, Ask, Generation, Hello, Lease, Refused
from evenstep.observe.feed import EVERY_S, SinkFeed
from evenstep.observe.overview import overview
from evenstep.observe.tally import Totals

log = logging.getLogger("evenstep")

TICK_S = 0.25


class Service:
    """One coordinator in one event loop. `open` it, wait for `ending`, then `close` it.

    `problems`, if it is set, gives problems of others that work for the run, for operators to see.
    """

    def __init__(
        self,
        folder: RunFolder,
        terms: Terms,
        about: dict[str, Any],
        sinks: SinkFeed | None = None,
    ) -> None:
        self.folder, self._about = folder, about
        self._sinks = sinks or SinkFeed()
        self.server = Server(folder.token, self)
        self._claim = Claim(folder.path, terms.lease_s, lambda: last_term(folder))
        self._claim_problem, self._claim_checked_s = "", time.monotonic()
        self._announced, self._fence_problem = 0, ""
        self._zero_s = time.monotonic()
        self.problems: Callable[[], Sequence[str]] = tuple
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        brain = Brain(self._open_journal, time.thread_time)
        self._tally = brain.tally
        clock_s, took_over, generation, untold = restore(brain, folder)
        self._zero_s -= clock_s
        record = MembershipRecorder(folder.membership)
        self.coordinator = Coordinator(brain, self.perform, lambda: self.now_s, record)
        numbers = [int(w[1:]) for w in folder.launched() if w[1:].isdecimal()]
        terms = replace(terms, term=self._claim.number)
        next_name = 1 + max(numbers, default=-1)
        self.handle(ev.Opened(terms=terms, next_name=next_name, generation=generation))
        if took_over is not None:
            event = replace(
                took_over,
                stopping=folder.take_stopping_mark(),
                ended=tuple(sorted(folder.ended())),
                lease_s=self._claim.lease_before_s,
            )
            ended = set(event.ended)
            if untold.num and ended.issuperset(brain.cluster.roster):  # else workers tell of them
                log.info(
                    "%d steps were trained while no coordinator was there, up to the newest "
                    "checkpoint",
                    untold.num,
                )
                self._tally.add_untold(untold)
            self.handle(event)

    @property
    def now_s(self) -> float:
        """The run's own clock: a resumed run's goes on where it stood."""
        return time.monotonic() - self._zero_s

    @property
    def state(self) -> RunState:
        """The current state of membership."""
        return self.coordinator.state

    async def open(self, address: str, port: int, tls: ssl.SSLContext | None = None) -> str:
        """Listen, and write the address to the run folder."""
        listening = await self.server.open(address, port, tls)
        elsewhere = ""
        if address in EVERYWHERE:  # which means this host to every reader
            host = outward_address(address) or socket.gethostname()
            elsewhere = spell(host, listening.rpartition(":")[2])
        self.folder.write_address(listening, elsewhere)
        self._tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._feed_sinks())]
        return listening

    async def ending(self) -> Ending:
        """Wait for the end of the run."""
        await self._ended.wait()
        assert self.state.ending is not None
        return self.state.ending

    async def close(self) -> None:
        """Close all connections, release the folder and close the sinks."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._offer_to_sinks()
        await self.server.close()
        self.coordinator.close()
        self.folder.close()
        await asyncio.to_thread(self._sinks.close)

    def handle(self, event: ev.AnyInput, reply: ev.SendReply | None = None) -> None:
        """Pass an input to membership, at the current time."""
        self._check_claim()
        self.coordinator.handle(event, reply)

    def _check_claim(self) -> None:
        """End the run without another write if another coordinator has it."""
        if time.monotonic() - self._claim_checked_s < TICK_S:
            return
        problem = ""
        try:
            self._claim.check()
        except TermOverError as e:
            self.coordinator.close()
            self.coordinator.handle(ev.KillAsked(why=str(e)))
        except OSError as e:
            problem = f"{self.folder.path / TERM} cannot be read: {e.strerror}"
            if problem != self._claim_problem:
                text = "%s; no lease is renewed until it can: workers end when theirs is over"
                log.error(text, problem)
        self._claim_problem, self._claim_checked_s = problem, time.monotonic()

    def status(self) -> dict[str, Any]:
        """The run as operators see it."""
        unsaved = {worker: contact.unsaved for worker, contact in self.state.contacts.items()}
        problems = [
            *self.coordinator.problems(),
            *(f"{w} cannot write checkpoints: {why}" for w, why in unsaved.items() if why),
            *(self.folder.problem, self._claim_problem, self._fence_problem),
            *self._sinks.problems,
            *self.problems(),
        ]
        state = self.state
        roster = state.cluster.roster if state.cluster is not None else ()
        problems += tell_faulty(state.nonfinite, roster, roster)
        told = status(state, self.now_s)
        settings = state.cluster.settings if state.cluster is not None else None
        rate = told["samples_per_s"]
        return {
            **told,
            "at_s": self.now_s,
            **overview(self._tally, settings, state.facts, rate),
            "noise_scale": state.cluster.noise.known_scale if state.cluster is not None else 0.0,
            "refused": dict(self.server.refused),
            "problems": [problem for problem in problems if problem],
        }

    @property
    def totals(self) -> Totals:
        """Of the run up to now."""
        return self._tally.totals

    async def _tick(self) -> None:
        while True:
            self.handle(ev.Tick())
            self.coordinator.flush()
            self.folder.flush()
            if self._fence_problem:
                self._move_fence()
            await asyncio.sleep(TICK_S)

    async def _feed_sinks(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            self._offer_to_sinks()

    def _offer_to_sinks(self) -> None:
        if not self._sinks:
            return
        try:
            self._sinks.offer(self.status())
        except Exception:  # no reason to stop training
            log.exception("the sinks get no more figures")
            self._sinks.close(0.0)
            self._sinks = SinkFeed()

    def _open_journal(self, settings: Settings, about: dict[str, Any]) -> Journal | None:
        return Journal.create(self.folder.journal, settings, {**self._about, **about})

    def answer(self, first: Hello | Ask, reply: ev.SendReply) -> None:
        """For the server: answer the first message of a client that knows the token."""
        match first:
            case Hello(generation=0) if self._claim_problem:
                reply(Refused(why=f"the run takes nobody in: {self._claim_problem}"))
            case Hello():
                event = ev.Connected(
                    worker=first.worker,
                    generation=first.generation,
                    forming=first.forming,
                    host=first.host,
                    pid=first.pid,
                    sees_folder=first.sees_folder,
                    checkpoint=self.folder.newest_checkpoint(),
                )
                self.handle(event, reply)
            case Ask(what="status"):
                reply(Answer(told=self.status()))
            case Ask(what="scale", num_workers=num_workers):
                self.handle(ev.ScaleAsked(num_workers=num_workers), reply)
            case Ask(what="drain", worker=worker):
                self.handle(ev.WorkerDrainAsked(worker=worker), reply)
            case Ask(what="stop"):
                self.handle(ev.StopAsked(why="an operator asked for it"), reply)
            case Ask(what=what):
                problem = f"cannot do {what!r}; known: status, scale, drain, stop"
                reply(Answer(problem=problem))

    def _move_fence(self) -> bool:
        """Fence off the checkpoints of workers that do not hear of the newest generation.

        False: another coordinator has the run.
        """
        path, problem = self.folder.path / TERM, ""
        try:
            self._claim.move_fence(self._announced)
        except TermOverError:
            self._claim_checked_s = -math.inf  # the next input ends the run
            return False
        except OSError as e:
            problem = f"{path}: cannot be written: {e.strerror}"
        if problem and not self._fence_problem:
            log.error("%s; workers of older generations may write checkpoints meanwhile", problem)
        elif self._fence_problem and not problem:
            log.warning("%s: is written again", path)
        self._fence_problem = problem
        return True

    def perform(self, effect: ev.OutwardEffect) -> None:
        """For the coordinator: perform one effect."""
        match effect:
            case ev.Send(message=Lease()) if self._claim_problem:
                pass
            case ev.Send(workers=workers, message=message):
                if isinstance(message, Generation):
                    self._announced = message.number
                    if not self._move_fence():
                        return
                self.server.send(message, *workers)
            case ev.HangUp(worker=worker):
                self.server.hang_up(worker)
            case ev.MarkStopping(stopping=stopping):
                with suppress(OSError):  # a coordinator that takes over now waits in vain
                    self.folder.mark_stopping(stopping)
            case ev.EndRun():
                self._ended.set()
            case _:
                assert_never(effect)
