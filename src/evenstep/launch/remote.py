"""Workers on an engine: follows a launcher whose calls may take long, hang or fail.

Nothing here waits for the engine. What is to be asked of it is decided by `requests`; each of the
launcher's methods has a lane of its own, so that a hanging `stop` does not keep workers from being
started. What the engine shows is told as news, in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from evenstep.launch.console import ConsoleOutput
from evenstep.launch.lane import Lane
from evenstep.launch.requests import (
    News,
    Requests,
    RequestUnmet,
    WorkerEnded,
    WorkerFound,
    WorkerLeaves,
    WorkerRuns,
)
from evenstep.ports import Launcher, LaunchRefusedError, Observed, Stage
from evenstep.types import WorkerId, listed

log = logging.getLogger("evenstep")

LIMIT_S = 600.0  # for the engine to meet a request
POLL_S = 2.0  # between two observations
TICK_S = 0.25
FIRST_LOOK_S = 60.0  # for the engine to show what an earlier coordinator asked for
HANG_S = 30.0  # a call that takes longer is reported
STOP_S = 45.0  # for workers to end once they were asked to: Slurm's own SIGKILL comes after 30 s
CLOSE_S = 5.0  # for the launcher to disconnect


class RemoteWorkers:
    """The workers of one run on one engine. Its calls return at once.

    `kinds` are what workers can be asked for. `tell` gets the news.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        engine: str,
        kinds: Sequence[str],
        logs: Path,
        console: ConsoleOutput,
        tell: Callable[[News], None],
        limit_s: float = LIMIT_S,
        poll_s: float = POLL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self._launcher, self._engine, self._kinds, self._logs = launcher, engine, kinds, logs
        self._tell, self._poll_s, self._clock = tell, poll_s, clock
        self._requests = Requests(limit_s)
        self._lanes = {name: Lane(f"{engine} {name}") for name in ("start", "stop", "observe")}
        self._problems: dict[str, str] = {}  # by lane
        self._observed_s = -poll_s
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._kind_of: dict[WorkerId, str] = {}
        self._num_failures: Counter[str] = Counter()  # since a worker of that kind last ran

    # The launcher's interface, for the coordinator.

    def start(self, kind: str, workers: Sequence[WorkerId]) -> None:
        """Ask the engine for workers, as soon as it answers."""
        for worker in workers:
            with suppress(OSError):  # the log reserves the name, and is where its output goes
                (self._logs / f"{worker}.log").touch()
            self.console.follow(worker, self._logs / f"{worker}.log")
            chosen = kind if kind in self._kinds else self._choose_kind()
            self._kind_of[worker] = chosen
            self._requests = self._requests.plan(chosen, (worker,), self._clock())
        self._hurry()

    def stop(self, workers: Sequence[WorkerId]) -> None:
        """Have workers end. They are told by news."""
        self._requests, news = self._requests.stop(workers)
        self._pass_on(news)
        self._hurry()

    def observe(self) -> dict[WorkerId, Observed]:
        """All open requests, as the engine last showed them."""
        unknown = Observed(stage=Stage.PENDING)
        return {w: r.observed or unknown for w, r in self._requests.open.items()}

    def close(self) -> None:
        """Follow the engine no longer. Workers run on: see `end_all`."""
        if self._timer is not None:
            self._timer.cancel()
        for lane in self._lanes.values():
            lane.close()
        self.console.close()

    # For the run.

    async def look_first(
        self, within_s: float = FIRST_LOOK_S
    ) -> Mapping[WorkerId, Observed] | None:
        """What the engine shows as a run is resumed; None: it does not answer."""
        answer: asyncio.Future[Mapping[WorkerId, Observed]] = asyncio.Future()

        def done(shown: Any, error: BaseException | None) -> None:
            if not answer.done():
                answer.set_result(shown) if error is None else answer.set_exception(error)

        self._lanes["observe"].submit(self._launcher.observe, done, self._clock())
        problem = f"it has not answered within {within_s:g} s"
        try:
            return await asyncio.wait_for(answer, within_s)
        except TimeoutError:
            pass
        except Exception as e:
            problem = _told(e)
        text = "%s does not show which workers still run: %s; their leases are waited for"
        log.warning(text, self._engine, problem)
        return None

    def adopt(self, shown: Mapping[WorkerId, Observed]) -> None:
        """Begin with workers that an earlier coordinator has asked for."""
        now_s = self._clock()
        self._requests, news = self._requests.observe(shown, now_s, now_s)
        self._pass_on(news)
        self._hurry()

    @property
    def running(self) -> set[WorkerId]:
        """Workers that have not ended, as far as is known."""
        return set(self._requests.open)

    @property
    def problems(self) -> list[str]:
        """What the engine does not do at the moment."""
        return [problem for problem in self._problems.values() if problem]

    def kill(self, worker: WorkerId) -> None:
        """End a worker. Engines kill what does not end by itself."""
        self.stop((worker,))

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all workers have ended. False: timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._requests.open:
                    self._changed.clear()
                    await self._changed.wait()
        return not self._requests.open

    async def end_all(self, grace_s: float = 0.0) -> None:
        """End all workers, after `grace_s` to end by themselves, and close."""
        if self._requests.open and not (grace_s > 0 and await self.wait(grace_s)):
            self.stop(sorted(self._requests.open))
            if not await self.wait(STOP_S):
                left = listed(sorted(self._requests.open))
                text = "%s still shows %s, %g s after they were asked to end: %s"
                how = "; ".join(self.problems) or "look for them there"
                log.warning(text, self._engine, left, STOP_S, how)
        lane = self._lanes["stop"]
        if not lane.is_busy:
            closed = asyncio.Event()
            lane.submit(self._launcher.close, lambda *_: closed.set(), self._clock())
            with suppress(TimeoutError):
                await asyncio.wait_for(closed.wait(), CLOSE_S)
        self.close()

    # What happens by itself.

    def _choose_kind(self) -> str:
        """The kind with the fewest workers, of those that last failed least often."""
        open = Counter(r.kind for r in self._requests.open.values())
        return min(self._kinds, key=lambda k: (self._num_failures[k], open[k]))

    def _hurry(self) -> None:
        """Act as soon as the event loop gets to it."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(0.0, self._act)

    def _act(self) -> None:
        now_s = self._clock()
        self._requests, news = self._requests.tick(now_s)
        self._pass_on(news)
        self._ask_to_start(now_s)
        self._ask_to_stop(now_s)
        self._look(now_s)
        for name, lane in self._lanes.items():
            if lane.since_s is not None and now_s - lane.since_s > HANG_S:
                self._report(name, f"has not answered for over {HANG_S:g} s")
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._act)

    def _ask_to_start(self, now_s: float) -> None:
        lane = self._lanes["start"]
        kind, workers = self._requests.to_start(now_s)
        if lane.is_busy or not workers:
            return
        self._requests = self._requests.starting(workers)
        self._observed_s = min(self._observed_s, now_s - self._poll_s / 2)

        def done(_: Any, error: BaseException | None) -> None:
            now_s = self._clock()
            if error is None:
                self._report("start", "")
                self._requests = self._requests.started(workers, now_s)
            else:
                final = isinstance(error, LaunchRefusedError)
                cause = f"{self._engine}: {_told(error)}"
                self._report("start", _told(error), quiet=final)
                self._requests, news = self._requests.start_failed(
                    workers, now_s, cause, final=final
                )
                self._pass_on(news)
            self._hurry()

        lane.submit(lambda: self._launcher.start(kind, workers), done, now_s)

    def _ask_to_stop(self, now_s: float) -> None:
        lane = self._lanes["stop"]
        workers = self._requests.to_stop(now_s)
        if lane.is_busy or not workers:
            return
        self._requests = self._requests.stopping(workers, now_s)

        def done(_: Any, error: BaseException | None) -> None:
            self._report("stop", "" if error is None else _told(error))
            self._observed_s = -self._poll_s  # look at once
            self._hurry()

        lane.submit(lambda: self._launcher.stop(workers), done, now_s)

    def _look(self, now_s: float) -> None:
        lane = self._lanes["observe"]
        if lane.is_busy or now_s - self._observed_s < self._poll_s:
            return
        self._observed_s = now_s

        def done(shown: Any, error: BaseException | None) -> None:
            self._report("observe", "" if error is None else _told(error))
            if error is None:
                self._requests, news = self._requests.observe(shown, now_s, self._clock())
                self._pass_on(news)
                self._hurry()

        lane.submit(self._launcher.observe, done, now_s)

    def _report(self, lane: str, problem: str, *, quiet: bool = False) -> None:
        """Log a problem once, and its end."""
        full = f"{self._engine}: {lane}: {problem}" if problem else ""
        before, self._problems[lane] = self._problems.get(lane, ""), "" if quiet else full
        if full and not before and not quiet:
            log.warning("%s; training goes on, and it is tried again", full)
        elif before and not full:
            log.info("%s: %s works again", self._engine, lane)

    def _pass_on(self, news: Sequence[News]) -> None:
        for item in news:
            match item:
                case WorkerFound(worker=worker):
                    self.console.follow(worker, self._logs / f"{worker}.log")
                case WorkerRuns(worker=worker):
                    self._num_failures[self._kind_of.get(worker, "")] = 0
                case WorkerEnded(worker=worker):
                    self.console.unfollow(worker)
                    self._kind_of.pop(worker, None)
                case RequestUnmet(workers=workers, cause=cause):
                    log.warning("not started: %s: %s", listed(workers), cause)
                    for worker in workers:
                        self.console.unfollow(worker)
                        self._num_failures[self._kind_of.pop(worker, "")] += 1
                case WorkerLeaves():
                    pass
            self._tell(item)
        if news:
            self._changed.set()


def _told(error: BaseException) -> str:
    return str(error) or type(error).__name__
