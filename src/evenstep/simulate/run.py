"""The engine on a virtual clock: modelled workers in, the brain's own decisions out.

A run is a function of the scenario, the policy and the seed; nothing else enters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import assert_never

import msgspec
import numpy as np

from evenstep.config import Choice, Settings
from evenstep.engine import Engine
from evenstep.errors import InvalidInputError, PausedError
from evenstep.journal import Journal
from evenstep.simulate.crew import Crew
from evenstep.simulate.limit import Oracle
from evenstep.simulate.result import Result
from evenstep.simulate.scenario import Scenario
from evenstep.simulate.timeline import Timeline
from evenstep.simulate.world import World
from evenstep.types import (
    AnyAction,
    AnyEvent,
    Drain,
    IntArray,
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
    StepReport,
    WorkerId,
)

LIMIT = Choice("limit")
"""Not a policy: the oracle in place of one, under the same rules of membership."""


def compare(
    scenario: Scenario, policies: Sequence[Choice] = (), *, journal: Path | None = None
) -> list[Result]:
    """Each policy on the same draws, each with what it achieved of the limit; the limit comes last.

    With a journal, the run of the one policy is recorded there.
    """
    named = policies or scenario.policies or (scenario.settings.policy,)
    chosen = [policy for policy in named if policy != LIMIT]
    if journal is not None and len(chosen) != 1:
        raise InvalidInputError("journal", f"holds one run, not {len(chosen)}; name one policy")
    for policy in chosen:
        Engine(_told(scenario, policy))  # a wrong name costs nothing yet
    results = [run(scenario, policy, journal=journal) for policy in chosen]
    limit = run(scenario, LIMIT)
    return [
        replace(result, achieved=result.samples_per_s / limit.samples_per_s)
        for result in (*results, limit)
    ]


def run(scenario: Scenario, policy: Choice | None = None, *, journal: Path | None = None) -> Result:
    """One policy on a scenario, from the first join to the last step."""
    return _Run(scenario, policy or scenario.settings.policy, journal).to_the_end()


def _told(scenario: Scenario, policy: Choice) -> Settings:
    # The limit's shares come from the oracle; `uniform` in its place only keeps the books.
    chosen = Choice("uniform") if policy == LIMIT else policy
    return msgspec.structs.replace(scenario.settings, policy=chosen)


class _Run:
    """The state of one run: the clock, the crew, and the plan in force."""

    def __init__(self, scenario: Scenario, policy: Choice, journal: Path | None) -> None:
        self.scenario, self.policy = scenario, policy
        settings = _told(scenario, policy)
        self.engine = Engine(settings)
        if journal is not None:
            about = {"scenario": scenario.about, "seed": scenario.seed, "clock": "virtual"}
            self.engine.journal = Journal.create(journal, settings, about)
        self.world = World(scenario)
        self.oracle = Oracle(self.world)
        self.timeline = Timeline()
        self.crew = Crew(self.world, self.timeline, scenario.detect_s)
        self.now_s, self.step, self.samples = 0.0, 0, 0

        self.roster: tuple[WorkerId, ...] = ()
        self.places: IntArray = np.zeros(0, dtype=np.int64)  # of the roster
        self.generation = self.stepped_generation = 0
        self.shares: IntArray | None = None  # None: paused
        self.paused_because = "no worker has joined"
        self.coming: deque[Plan] = deque()  # plans for a later step
        self.leaving: dict[WorkerId, int] = {}  # the last step each takes part in

        self.num_plans = self.num_regroups = self.num_void_steps = 0
        self.step_s: list[float] = []
        self.expected_s: list[float] = []
        self.limit_s: list[float] = []
        self.wait_s = self.worker_s = 0.0

    def to_the_end(self) -> Result:
        """Run, and say what came out."""
        self.crew.begin()
        for ask in self.scenario.asks:
            self.timeline.at(ask.at_s, SizeAsked(num_workers=ask.num_workers))
        try:
            while not self._done():
                self._meet()
                if self.shares is None:
                    self._sleep()
                else:
                    self._step(self.shares)
        finally:
            if self.engine.journal is not None:
                self.engine.journal.close()
        return Result(
            policy=self.policy.name,
            time_s=self.now_s,
            samples=self.samples,
            cost=self.crew.cost(self.now_s),
            wait_fraction=self.wait_s / self.worker_s,
            num_plans=self.num_plans,
            num_regroups=self.num_regroups,
            num_void_steps=self.num_void_steps,
            step_s=np.array(self.step_s),
            expected_s=np.array(self.expected_s),
            limit_s=np.array(self.limit_s),
        )

    def _done(self) -> bool:
        if self.scenario.steps:
            return self.step >= self.scenario.steps
        return self.samples >= self.scenario.samples

    def _meet(self) -> None:
        """Tell the brain what has happened by now. It hears of it between two steps."""
        due = list(self.timeline.until(self.now_s))
        lost = self.crew.missed(self.now_s)
        over = [w for w, last in self.leaving.items() if self.shares is None or last < self.step]
        over += [w for e in due if isinstance(e, Left) for w in e.workers]
        left = [w for w in dict.fromkeys(over) if w in self.crew.there and w not in lost]
        joined = tuple(w for e in due if isinstance(e, Joined) for w in e.workers)
        if lost:
            self._end(lost, lost=True)
            self._tell(Lost(workers=tuple(lost), cause="failed"))
        if left:
            self._end(left, lost=False)
            self._tell(Left(workers=tuple(left)))
        if joined:
            self.crew.join(joined)
            self._tell(Joined(workers=joined))
        for event in due:
            if not isinstance(event, Joined | Left):
                self._tell(event)

    def _end(self, workers: list[WorkerId], *, lost: bool) -> None:
        for worker in workers:
            self.crew.end(worker, self.now_s, lost=lost)
            self.leaving.pop(worker, None)

    def _sleep(self) -> None:
        """Paused: let the clock run to what comes next."""
        wakes_s = min(self.timeline.next_s, self.crew.next_failure_s()[1])
        if wakes_s == float("inf"):
            raise PausedError(
                f"the scenario stands still at {self.now_s:.1f} s, after {self.step} steps, and "
                f"nothing ahead wakes it: {self.paused_because}"
            )
        self.now_s = max(self.now_s, wakes_s)

    def _step(self, shares: IntArray) -> None:
        if self.generation != self.stepped_generation:
            self.now_s += self.scenario.regroup_s if self.stepped_generation else 0.0
            self.stepped_generation = self.generation
        while self.coming and self.coming[0].from_step <= self.step:
            shares = self.shares = self._columns(self.coming.popleft())
        batch = int(shares.sum())
        slowdown = self.world.slowdown(self.now_s)[0][self.places]
        curves = self.world.curves(self.places, slowdown, batch)
        best = self.oracle.shares(curves, self.places, slowdown, batch)
        if self.policy == LIMIT:
            shares = best
        expected_s = curves.seconds(shares)
        compute_s = expected_s * self.world.jitter(self.step)[self.places]
        reduce_s = self.scenario.communication.seconds(len(self.places))
        slowest_s = float(compute_s.max())
        end_s = self.now_s + slowest_s + reduce_s
        fails_s, noticed_s = self.crew.next_failure_s()
        if fails_s < end_s:
            self.num_void_steps += 1
            self.now_s = max(self.now_s, noticed_s)
            return

        waited_s = slowest_s - compute_s
        self.step_s.append(end_s - self.now_s)
        self.expected_s.append(float(expected_s.max()) + reduce_s)
        self.limit_s.append(float(curves.seconds(best).max()) + reduce_s)
        self.wait_s += float(waited_s.sum())
        self.worker_s += self.step_s[-1] * len(self.places)
        self.now_s, self.samples, self.step = end_s, self.samples + batch, self.step + 1
        free_cpu = self.world.free_cpu(end_s, self.step)[self.places]
        columns = (shares, compute_s, waited_s, free_cpu)
        reports = map(StepReport, self.roster, *(c.tolist() for c in columns))
        self._tell(
            StepDone(
                step=self.step - 1,
                generation=self.generation,
                seconds=self.step_s[-1],
                reports=tuple(reports),
            )
        )

    def _tell(self, event: AnyEvent) -> None:
        for action in self.engine.handle(self.now_s, event):
            self._obey(action)

    def _obey(self, action: AnyAction) -> None:
        match action:
            case Regroup(roster=roster, generation=generation):
                self.roster, self.generation = roster, generation
                self.places = np.array([self.crew.place_of[w] for w in roster], dtype=np.int64)
                self.shares = None
                self.coming.clear()
                self.num_regroups += 1
            case Plan():
                self.num_plans += 1
                if self.shares is None:  # what a new generation has prefetched is cut anew
                    self.shares = self._columns(action)
                else:
                    self.coming.append(action)
            case Launch(num_workers=ordered, kind=kind):
                missing = ordered - self.crew.launch(action, self.now_s)
                if missing:
                    cause = "none left in the pool"
                    failed = LaunchFailed(num_workers=missing, kind=kind, cause=cause)
                    self.timeline.at(self.now_s, failed)
            case Drain(worker=worker):
                self.leaving.setdefault(worker, self.step)
            case Pause(reason=reason):
                self.shares, self.paused_because = None, reason
                self.coming.clear()
            case Stay():
                pass
            case _:
                assert_never(action)

    def _columns(self, plan: Plan) -> IntArray:
        return np.array([plan.shares[w] for w in self.roster], dtype=np.int64)
