"""Membership, driven: one input at a time, each recorded, its effects performed in order."""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

from evenstep.coordinate import events as ev
from evenstep.coordinate.brain import Brain
from evenstep.coordinate.membership import membership
from evenstep.coordinate.record import MembershipRecorder
from evenstep.coordinate.state import RunState
from evenstep.errors import InvalidInputError
from evenstep.types import WorkerId

log = logging.getLogger("evenstep")
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING}


class StartsWorkers(Protocol):
    """The launcher as the coordinator's loop uses it: it returns at once."""

    def start(self, kind: str, workers: Sequence[WorkerId]) -> None: ...
    def stop(self, workers: Sequence[WorkerId]) -> None: ...


class Coordinator:
    """The state of one run and the drivers around it; `perform` has the sockets and files."""

    def __init__(
        self,
        brain: Brain,
        perform: Callable[[ev.OutwardEffect], None],
        clock: Callable[[], float],
        record: MembershipRecorder,
    ) -> None:
        self.state = RunState()
        self.launcher: StartsWorkers | None = None
        self._brain, self._perform, self._clock, self._record = brain, perform, clock, record
        self._waiting: deque[tuple[ev.AnyInput, ev.SendReply | None]] = deque()
        self._busy = False

    def handle(self, event: ev.AnyInput, reply: ev.SendReply | None = None) -> None:
        """Handle an input now; one that arrives meanwhile is next.

        InvalidInputError: it cannot be true, and nothing changed. A mistake of our own ends the
        run.
        """
        self._waiting.append((event, reply))
        if self._busy:
            return
        self._busy = True
        try:
            while self._waiting:
                self._handle(*self._waiting.popleft())
        finally:
            self._busy = False

    def _handle(self, event: ev.AnyInput, reply: ev.SendReply | None) -> None:
        now_s, before, num_decided = self._clock(), self.state, self._brain.num_decided
        try:
            self.state, effects = membership(before, event, now_s, self._brain)
            decided = range(num_decided, self._brain.num_decided)
            self._record.write(now_s, event, before, self.state, effects, decided)
            self._brain.sync()
            for effect in effects:
                self._obey(effect, reply)
        except InvalidInputError:
            raise
        except Exception as e:
            if self.state is before:  # what crashes the machine is what a bug report needs
                decided = range(num_decided, self._brain.num_decided)
                self._record.write(now_s, event, before, None, (), decided)
            why = f"the coordinator failed: {e}"
            if not isinstance(event, ev.Crashed):
                self._handle(ev.Crashed(why=why, traceback=traceback.format_exc()), None)
            raise

    def _obey(self, effect: ev.AnyEffect, reply: ev.SendReply | None) -> None:
        match effect:
            case ev.Log(text=text, level=level):
                log.log(_LEVELS[level], "%s", text)
            case ev.Reply(message=message):
                if reply is not None:
                    reply(message)
            case ev.StartProcesses():
                self._launch(effect)
            case ev.StopProcess(worker=worker):
                if self.launcher is not None:
                    self.launcher.stop((worker,))
            case ev.Send() | ev.HangUp() | ev.MarkStopping() | ev.EndRun():
                self._perform(effect)
            case _:
                assert_never(effect)

    def _launch(self, order: ev.StartProcesses) -> None:
        """Launch workers one by one. Those that could not be launched are the next input."""
        problems: dict[WorkerId, str] = {}
        for worker in order.workers:
            try:
                if self.launcher is None:
                    raise RuntimeError("this run starts no workers itself; join some")
                self.launcher.start(order.kind, (worker,))
            except Exception as e:  # whatever happens in a launcher, the run goes on without it
                log.warning("a worker could not be started: %s", e)
                problems[worker] = str(e) or type(e).__name__
        if problems:
            cause = next(iter(problems.values()))
            failed = ev.NotStarted(workers=tuple(problems), cause=cause)
            self._waiting.appendleft((failed, None))

    def flush(self) -> None:
        """Write what waits for a disk that was full, if there is room by now."""
        self._brain.flush()
        self._record.flush()

    def problems(self) -> list[str]:
        """Which files cannot be written, and why."""
        return [problem for problem in (self._brain.problem, self._record.problem) if problem]

    def close(self) -> None:
        """Close the journal and the record."""
        self._brain.close()
        self._record.close()
