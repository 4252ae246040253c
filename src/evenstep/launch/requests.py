"""What a run planned, what it has asked of an engine, and what the engine shows: pure bookkeeping.

The three may differ for a long time. A planned worker may not be asked for yet, because the engine
does not answer; one that was asked for may wait in a queue; one that was never asked for, or was
given up, may show up after all, if the answer to a request was lost. Time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from evenstep.ports import Observed, Stage
from evenstep.types import WorkerId

MAX_HIDDEN = 2  # observations in a row that do not show a worker, after which it is gone
UNKNOWN_CODE = 75  # os.EX_TEMPFAIL: no fault of the script's, as far as is known
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
RETRIES_IN_LIMIT = 5  # at least so often is an engine asked before a request is given up
STOP_AGAIN_S = 15.0  # an engine that was asked to end a worker and still shows it is asked again


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One worker, from the plan to its end."""

    kind: str
    planned_s: float
    in_flight: bool = False  # the engine is being asked, and has not answered yet
    asked: bool = False  # the engine has accepted it, or shows it
    doubtful: bool = False  # the last attempt failed, and the engine may have accepted it anyway
    changed_s: float = 0.0  # an observation that began before knows nothing of the last attempt
    num_failures: int = 0
    retry_s: float = 0.0  # not asked again before
    problem: str = ""  # of the last attempt
    observed: Observed | None = None  # as last shown
    num_hidden: int = 0  # observations in a row that did not show it
    stopping: bool = False  # it is to end
    stop_s: float = 0.0  # not asked to end before

    @property
    def runs(self) -> bool:
        return self.observed is not None and self.observed.stage is Stage.RUNNING

    @property
    def may_exist(self) -> bool:
        """Whether the engine may have it."""
        return self.asked or self.doubtful or self.in_flight

    def waits_for(self) -> str:
        """Why it has not started, in words."""
        if self.asked:
            why = self.observed.why if self.observed is not None else ""
            return f"pending: {why}" if why else "pending"
        return self.problem or "the engine has not answered"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUnmet:
    """Workers that will not come."""

    workers: tuple[WorkerId, ...]
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRuns:
    """The engine runs a worker."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFound:
    """The engine shows a worker that an earlier coordinator asked for."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeaves:
    """The engine is about to take a worker's host away."""

    worker: WorkerId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnded:
    """A worker has ended. No exit code: the engine ended it, or lost its host."""

    worker: WorkerId
    exit_code: int | None
    why: str


News = RequestUnmet | WorkerRuns | WorkerFound | WorkerLeaves | WorkerEnded


@dataclass(frozen=True, slots=True)
class Requests:
    """A run's workers that have not ended. Methods return the next value, and news."""

    limit_s: float  # for the engine to meet a request
    open: Mapping[WorkerId, Request] = field(default_factory=dict)
    given_up: frozenset[WorkerId] = frozenset()

    def plan(self, kind: str, workers: Iterable[WorkerId], now_s: float) -> Requests:
        """The run wants these workers."""
        return self._with({w: Request(kind=kind, planned_s=now_s) for w in workers})

    def stop(self, workers: Iterable[WorkerId]) -> tuple[Requests, list[News]]:
        """These workers are to end. Those that the engine was never asked for are not started."""
        known = self._known(workers)
        never = tuple(w for w, r in known.items() if not r.may_exist)
        marked = {w: replace(r, stopping=True) for w, r in known.items() if r.may_exist}
        news: list[News] = [RequestUnmet(workers=never, cause="no longer needed")] if never else []
        return self._with(marked)._without(never), news

    # What the engine is to be asked.

    def to_start(self, now_s: float) -> tuple[str, tuple[WorkerId, ...]]:
        """A kind, and the workers of that kind that it is time to ask for; none: an empty tuple.

        A failed attempt is repeated only after an observation that does not show the worker.
        """
        due = {w: r.kind for w, r in self._planned().items() if now_s >= r.retry_s}
        kind = next(iter(due.values()), "")
        return kind, tuple(w for w, k in due.items() if k == kind)

    def to_stop(self, now_s: float) -> tuple[WorkerId, ...]:
        """Workers that it is time to end."""
        stopping = {w: r for w, r in self.open.items() if r.stopping and r.asked}
        return tuple(w for w, r in stopping.items() if now_s >= r.stop_s)

    def next_s(self) -> float | None:
        """When there is something to ask of the engine; None: never."""
        stops = [r.stop_s for r in self.open.values() if r.stopping and r.asked]
        return min([*stops, *(r.retry_s for r in self._planned().values())], default=None)

    def starting(self, workers: Iterable[WorkerId]) -> Requests:
        """The engine is asked for them now."""
        return self._with({w: replace(r, in_flight=True) for w, r in self._known(workers).items()})

    def stopping(self, workers: Iterable[WorkerId], now_s: float) -> Requests:
        """The engine is asked now to end them."""
        stop_s = now_s + STOP_AGAIN_S
        return self._with({w: replace(r, stop_s=stop_s) for w, r in self._known(workers).items()})

    # What came of it.

    def started(self, workers: Iterable[WorkerId], now_s: float) -> Requests:
        """The engine has accepted them."""
        return self._with(
            {
                w: replace(r, in_flight=False, asked=True, changed_s=now_s)
                for w, r in self._known(workers).items()
            }
        )

    def start_failed(
        self, workers: Iterable[WorkerId], now_s: float, cause: str, *, final: bool
    ) -> tuple[Requests, list[News]]:
        """The attempt failed: repeat it later, with back-off, unless that is final."""
        known = self._known(workers)
        if final:
            lost = tuple(w for w, r in known.items() if not r.asked)
            wanted = tuple(w for w in lost if w not in self.given_up)
            news: list[News] = [RequestUnmet(workers=wanted, cause=cause)] if wanted else []
            return self._without(lost), news
        longest_s = min(LAST_RETRY_S, self.limit_s / RETRIES_IN_LIMIT)
        failed = {
            worker: replace(
                r,
                in_flight=False,
                doubtful=not r.asked,
                changed_s=now_s,
                num_failures=r.num_failures + 1,
                retry_s=now_s + min(longest_s, FIRST_RETRY_S * 2 ** min(r.num_failures, 16)),
                problem=cause,
            )
            for worker, r in known.items()
        }
        return self._with(failed), []

    def observe(
        self, shown: Mapping[WorkerId, Observed], began_s: float, now_s: float
    ) -> tuple[Requests, list[News]]:
        """What the engine shows, in an observation that began and ended at these times."""
        news: list[News] = []
        open, given_up = dict(self.open), set(self.given_up)
        for worker, observed in shown.items():
            before, wanted = open.pop(worker, None), worker not in given_up
            if (seen := _seen(worker, before, observed, now_s, news, wanted=wanted)) is not None:
                open[worker] = seen
                if not seen.stopping:
                    given_up.discard(worker)
        for worker, request in self.open.items():
            if worker in shown or request.in_flight or request.changed_s >= began_s:
                continue
            wanted = worker not in given_up
            if (missed := _missed(worker, request, news, wanted=wanted)) is not None:
                open[worker] = missed
            else:
                del open[worker]
        requests = replace(self, open=open, given_up=frozenset(given_up))
        asked = {w: r for w, r in open.items() if r.asked and not r.runs}
        return requests._give_up(asked, now_s, news), news

    def tick(self, now_s: float) -> tuple[Requests, list[News]]:
        """Give up what the engine has not even accepted within the limit.

        Workers that it has accepted are given up by an observation: they may run by now.
        """
        news: list[News] = []
        waiting = {w: r for w, r in self.open.items() if not r.asked}
        return self._give_up(waiting, now_s, news), news

    def _planned(self) -> dict[WorkerId, Request]:
        """Workers that the engine has not been asked for, or surely in vain."""
        return {w: r for w, r in self.open.items() if not (r.may_exist or r.stopping)}

    def _give_up(
        self, waiting: Mapping[WorkerId, Request], now_s: float, news: list[News]
    ) -> Requests:
        overdue = {
            w: r
            for w, r in waiting.items()
            if not r.stopping and now_s - r.planned_s > self.limit_s
        }
        for worker, r in overdue.items():
            cause = f"given up after {self.limit_s:g} s: {r.waits_for()}"
            news.append(RequestUnmet(workers=(worker,), cause=cause))
        withdrawn = {w: replace(r, stopping=True) for w, r in overdue.items()}
        never = [w for w, r in overdue.items() if not r.may_exist]
        requests = self._with(withdrawn)._without(never)
        return replace(requests, given_up=self.given_up | overdue.keys())

    def _known(self, workers: Iterable[WorkerId]) -> dict[WorkerId, Request]:
        return {w: self.open[w] for w in workers if w in self.open}

    def _with(self, some: Mapping[WorkerId, Request]) -> Requests:
        return replace(self, open={**self.open, **some}) if some else self

    def _without(self, workers: Iterable[WorkerId]) -> Requests:
        gone = set(workers)
        if not gone:
            return self
        return replace(self, open={w: r for w, r in self.open.items() if w not in gone})


def _seen(
    worker: WorkerId,
    request: Request | None,
    observed: Observed,
    now_s: float,
    news: list[News],
    *,
    wanted: bool,
) -> Request | None:
    """The engine shows a worker. None: it has ended."""
    if observed.stage is Stage.ENDED:
        if request is not None and wanted:
            code, why = observed.exit_code, observed.why
            news.append(WorkerEnded(worker=worker, exit_code=code, why=why))
        return None
    runs = observed.stage is Stage.RUNNING
    if request is None:
        # One that was given up and runs after all may have joined by now: it is not stopped.
        request = Request(kind="", planned_s=now_s, stopping=not (wanted or runs))
        if runs or wanted:
            news.append(WorkerFound(worker=worker))
    if runs and not request.runs and not request.stopping:
        news.append(WorkerRuns(worker=worker))
    if observed.leaves and not (request.observed and request.observed.leaves):
        news.append(WorkerLeaves(worker=worker, why=observed.leaves))
    return replace(request, asked=True, doubtful=False, observed=observed, num_hidden=0)


def _missed(
    worker: WorkerId, request: Request, news: list[News], *, wanted: bool
) -> Request | None:
    """The engine does not show a worker. None: it has ended, or never existed."""
    if not request.asked:  # the attempt has come to nothing
        if not request.stopping:
            return replace(request, doubtful=False)
        if wanted:
            news.append(RequestUnmet(workers=(worker,), cause="no longer needed"))
        return None
    if request.num_hidden + 1 < MAX_HIDDEN:
        return replace(request, num_hidden=request.num_hidden + 1)
    if wanted:
        why = "the engine does not show it any more"
        news.append(WorkerEnded(worker=worker, exit_code=UNKNOWN_CODE, why=why))
    return None
