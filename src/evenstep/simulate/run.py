"""Runs the engine on a virtual clock with simulated workers.

The result depends on nothing but the scenario, the policy and the seed.
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
from evenstep.decide.split import split
from evenstep.engine import Engine
from evenstep.errors import InvalidInputError, PausedError
from evenstep.journal import Journal
from evenstep.ports import Curves
from evenstep.simulate.result import Result
from evenstep.simulate.scenario import Scenario
from evenstep.simulate.workers import SimulatedWorkers, Timeline
from evenstep.simulate.world import World
from evenstep.types import (
    AnyAction,
    AnyEvent,
    Drain,
    FloatArray,
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
"""Not a policy: the oracle in place of one, under the same membership rules."""


def compare_policies(
    scenario: Scenario, policies: Sequence[Choice] = (), *, journal: Path | None = None
) -> list[Result]:
    """Run each policy with the same noise, relative to the limit, which comes last.

    `journal` records the run; it needs exactly one policy.
    """
    named = policies or scenario.policies or (scenario.settings.policy,)
    chosen = [policy for policy in named if policy != LIMIT]
    if journal is not None and len(chosen) != 1:
        raise InvalidInputError("journal", f"records one run, not {len(chosen)}; name one policy")
    for policy in chosen:
        Engine(_settings(scenario, policy))  # reject a wrong name before any run
    results = [run(scenario, policy, journal=journal) for policy in chosen]
    limit = run(scenario, LIMIT)
    return [
        replace(result, achieved=result.samples_per_s / limit.samples_per_s)
        for result in (*results, limit)
    ]


def run(scenario: Scenario, policy: Choice | None = None, *, journal: Path | None = None) -> Result:
    """Run one policy on a scenario, from the first join to the last step."""
    return _Run(scenario, policy or scenario.settings.policy, journal).run()


def _settings(scenario: Scenario, policy: Choice) -> Settings:
    # The oracle sets the limit's shares; `uniform` is a placeholder that handles membership.
    chosen = Choice("uniform") if policy == LIMIT else policy
    return msgspec.structs.replace(scenario.settings, policy=chosen)


class _Oracle:
    """The limit: the best shares, computed from every worker's true curve, without noise."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._inputs: tuple[bytes, bytes, int] | None = None
        self._shares = np.zeros(0, dtype=np.int64)

    def shares(self, curves: Curves, slots: IntArray, slowdown: FloatArray, batch: int) -> IntArray:
        """The best shares now; solved again only if curves, workers or batch have changed."""
        inputs = (slots.tobytes(), slowdown.tobytes(), batch)
        if inputs != self._inputs:
            upper = np.minimum(self._world.caps[slots], batch)
            self._shares = split(curves, batch, np.zeros_like(upper), upper)
            self._inputs = inputs
        return self._shares


class _Run:
    """The state of one run: the clock, the workers, and the current plan."""

    def __init__(self, scenario: Scenario, policy: Choice, journal: Path | None) -> None:
        self.scenario, self.policy = scenario, policy
        settings = _settings(scenario, policy)
        self.engine = Engine(settings)
        if journal is not None:
            about = {"scenario": scenario.about, "seed": scenario.seed, "clock": "virtual"}
            self.engine.journal = Journal.create(journal, settings, about)
        self.world = World(scenario)
        self.oracle = _Oracle(self.world)
        self.timeline = Timeline()
        self.workers = SimulatedWorkers(self.world, self.timeline, scenario.detect_s)
        self.now_s, self.step, self.samples = 0.0, 0, 0
        self.last_end_s: float | None = None  # of a committed step

        self.roster: tuple[WorkerId, ...] = ()
        self.slots: IntArray = np.zeros(0, dtype=np.int64)  # by rank
        self.generation = self.stepped_generation = 0
        self.shares: IntArray | None = None  # None: paused
        self.paused_because = "no worker has joined"
        self.upcoming: deque[Plan] = deque()  # plans for a later step
        self.leaving: dict[WorkerId, int] = {}  # worker -> its last step

        self.num_void_steps = 0
        self.step_s: list[float] = []
        self.expected_s: list[float] = []
        self.limit_s: list[float] = []
        self.wait_s = self.worker_s = 0.0

    def run(self) -> Result:
        """Run to the last step."""
        self.workers.schedule_initial()
        for ask in self.scenario.asks:
            self.timeline.at(ask.at_s, SizeAsked(num_workers=ask.num_workers))
        try:
            while not self._done():
                self._handle_due_events()
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
            cost=self.workers.cost(self.now_s),
            wait_fraction=self.wait_s / self.worker_s,
            num_void_steps=self.num_void_steps,
            step_s=np.array(self.step_s),
            expected_s=np.array(self.expected_s),
            limit_s=np.array(self.limit_s),
        )

    def _done(self) -> bool:
        if self.scenario.steps:
            return self.step >= self.scenario.steps
        return self.samples >= self.scenario.samples

    def _handle_due_events(self) -> None:
        """Report what has happened to the brain, between two steps."""
        due = list(self.timeline.until(self.now_s))
        lost = self.workers.detected_failures(self.now_s)
        gone = [w for w, last in self.leaving.items() if self.shares is None or last < self.step]
        gone += [w for e in due if isinstance(e, Left) for w in e.workers]
        left = [w for w in dict.fromkeys(gone) if w in self.workers.joined and w not in lost]
        joined = tuple(w for e in due if isinstance(e, Joined) for w in e.workers)
        if lost:
            self._end(lost, lost=True)
            self._handle(Lost(workers=tuple(lost), cause="failed"))
        if left:
            self._end(left, lost=False)
            self._handle(Left(workers=tuple(left)))
        if joined:
            self.workers.join(joined)
            self._handle(Joined(workers=joined))
        for event in due:
            if not isinstance(event, Joined | Left):
                self._handle(event)

    def _end(self, workers: list[WorkerId], *, lost: bool) -> None:
        for worker in workers:
            self.workers.end(worker, self.now_s, lost=lost)
            self.leaving.pop(worker, None)

    def _sleep(self) -> None:
        """Paused: advance the clock to the next event."""
        resumes_s = min(self.timeline.next_s, self.workers.next_failure_s()[1])
        if resumes_s == float("inf"):
            raise PausedError(
                f"the simulated run is paused at {self.now_s:.1f} s, after {self.step} steps, and "
                f"no later event can resume it: {self.paused_because}"
            )
        self.now_s = max(self.now_s, resumes_s)

    def _step(self, shares: IntArray) -> None:
        if self.generation != self.stepped_generation:
            self.now_s += self.scenario.regroup_s if self.stepped_generation else 0.0
            self.stepped_generation = self.generation
        while self.upcoming and self.upcoming[0].from_step <= self.step:
            shares = self.shares = self._shares_by_rank(self.upcoming.popleft())
        batch = int(shares.sum())
        slowdown = self.world.slowdown(self.now_s)[0][self.slots]
        curves = self.world.curves(self.slots, slowdown, batch)
        best = self.oracle.shares(curves, self.slots, slowdown, batch)
        if self.policy == LIMIT:
            shares = best
        expected_s = curves.seconds(shares)
        compute_s = expected_s * self.world.jitter(self.step)[self.slots]
        reduce_s = self.scenario.communication.seconds(len(self.slots))
        slowest_s = float(compute_s.max())
        end_s = self.now_s + slowest_s + reduce_s
        fails_s, detected_s = self.workers.next_failure_s()
        if fails_s < end_s:
            self.num_void_steps += 1
            self.now_s = max(self.now_s, detected_s)
            return

        idle_s = 0.0 if self.last_end_s is None else self.now_s - self.last_end_s
        self.last_end_s = end_s
        waited_s = slowest_s - compute_s
        self.step_s.append(end_s - self.now_s)
        self.expected_s.append(float(expected_s.max()) + reduce_s)
        self.limit_s.append(float(curves.seconds(best).max()) + reduce_s)
        self.wait_s += float(waited_s.sum())
        self.worker_s += self.step_s[-1] * len(self.slots)
        self.now_s, self.samples, self.step = end_s, self.samples + batch, self.step + 1
        free_cpu = self.world.free_cpu(end_s, self.step)[self.slots]
        columns = (shares, compute_s, waited_s, free_cpu)
        reports = map(StepReport, self.roster, *(c.tolist() for c in columns))
        self._handle(
            StepDone(
                step=self.step - 1,
                generation=self.generation,
                seconds=self.step_s[-1],
                reports=tuple(reports),
                idle_s=idle_s,
            )
        )

    def _handle(self, event: AnyEvent) -> None:
        for action in self.engine.handle(self.now_s, event):
            self._apply(action)

    def _apply(self, action: AnyAction) -> None:
        match action:
            case Regroup(roster=roster, generation=generation):
                self.roster, self.generation = roster, generation
                self.slots = np.array([self.workers.slot_of[w] for w in roster], dtype=np.int64)
                self.shares = None
                self.upcoming.clear()
            case Plan():
                # A new generation re-cuts its prefetched batches: the plan applies at once.
                if self.shares is None:
                    self.shares = self._shares_by_rank(action)
                else:
                    self.upcoming.append(action)
            case Launch(num_workers=ordered, kind=kind):
                missing = ordered - self.workers.launch(action, self.now_s)
                if missing:
                    cause = "none left in the pool"
                    failed = LaunchFailed(num_workers=missing, kind=kind, cause=cause)
                    self.timeline.at(self.now_s, failed)
            case Drain(worker=worker):
                self.leaving.setdefault(worker, self.step)
            case Pause(reason=reason):
                self.shares, self.paused_because = None, reason
                self.upcoming.clear()
            case Stay():
                pass
            case _:
                assert_never(action)

    def _shares_by_rank(self, plan: Plan) -> IntArray:
        return np.array([plan.shares[w] for w in self.roster], dtype=np.int64)
