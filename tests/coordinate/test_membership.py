"""Membership in any order of joining, leaving, dying, finishing and restarting."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from evenstep.coordinate.events import Terms
from evenstep.messages import Failed
from tests.coordinate.replayed import replayed
from tests.coordinate.world import SimWorker, World
from tests.hypothesis_examples import examples

some = st.integers(0, 10)


def status_of(status: dict[str, Any], worker: str) -> str:
    """The state of a worker, as operators see it."""
    return next(str(row["state"]) for row in status["workers"] if row["worker"] == worker)


class Membership(RuleBasedStateMachine):
    """A model cluster to which anything may happen at any time."""

    @initialize(
        num=st.integers(0, 3),
        joined=st.integers(0, 3),
        spares=st.integers(0, 2),
        settled=st.booleans(),
    )
    def begin(self, num: int, joined: int, spares: int, settled: bool) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.world = World(
            self.folder,
            Terms(gather_s=5.0, lease_s=60.0, restarts=3, spares=spares, sets=("policy=uniform",)),
        )
        self.checked = 0
        self.rosters: dict[int, tuple[str, ...]] = {}
        self.world.start(num)
        for _ in range(joined):
            self.world.join()
        if settled:
            self.world.settle(8)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.comes_to_rest()
            self.world.close()
            replayed(self.folder)
        finally:
            self.world.close()
            shutil.rmtree(self.folder)

    def pick(self, which: int) -> SimWorker | None:
        there = [w for w in self.world.workers.values() if w.connected]
        return there[which % len(there)] if there else None

    @rule(ready=st.booleans())
    def a_worker_comes(self, ready: bool) -> None:
        worker = self.world.connect()
        if ready and worker is not None:
            self.world.ready(worker)

    @precondition(lambda self: self.world.starting)
    @rule(ready=st.booleans())
    def a_launched_worker_comes(self, ready: bool) -> None:
        worker = self.world.connect(self.world.starting.pop(0), launched=True)
        if ready and worker is not None:
            self.world.ready(worker)

    @precondition(lambda self: self.world.starting)
    @rule(code=st.sampled_from([-9, 0, 75, 75]))
    def a_launched_worker_fails(self, code: int) -> None:
        self.world.exited(self.world.starting.pop(0), code)

    @precondition(lambda self: self.unready())
    @rule(which=some)
    def one_is_ready(self, which: int) -> None:
        waiting = self.unready()
        self.world.ready(waiting[which % len(waiting)])

    def unready(self) -> list[SimWorker]:
        return [w for w in self.world.workers.values() if w.connected and not w.said_ready]

    @rule(which=some, slowly=st.booleans())
    def one_dies(self, which: int, slowly: bool) -> None:
        if worker := self.pick(which):
            self.world.die(worker, slowly=slowly)

    @rule(which=some)
    def one_freezes(self, which: int) -> None:
        if worker := self.pick(which):
            worker.frozen = True

    @rule(which=some, other=some)
    def two_cannot_connect_any_more(self, which: int, other: int) -> None:
        one, two = self.pick(which), self.pick(other)
        if one and two and one is not two:
            self.world.cut_links.add(frozenset((one.id, two.id)))

    @rule()
    def all_can_connect_again(self) -> None:
        self.world.cut_links.clear()

    @rule(holds=st.booleans())
    def control_threads_are_slow_or_quick_again(self, holds: bool) -> None:
        self.world.holds_answers = holds

    @rule()
    def control_threads_answer(self) -> None:
        self.world.answer()

    @rule(which=some)
    def one_wants_to_leave(self, which: int) -> None:
        if worker := self.pick(which):
            self.world.leave(worker)

    @rule(which=some)
    def one_is_drained(self, which: int) -> None:
        if worker := self.pick(which):
            self.world.ask("drain", worker=worker.id)

    @rule(which=some)
    def the_script_fails_on_a_newcomer(self, which: int) -> None:
        world = self.world
        new = [w for w in world.workers.values() if w.connected and w.id not in world.state.proven]
        trains = world.state.proven.intersection(world.state.members)
        if new and trains and world.ending is None:
            world.say(new[which % len(new)], Failed(told="no such file"))
            world.end(new[which % len(new)], 1)

    @rule(which=some)
    @precondition(lambda self: self.world.step > 3)
    def the_script_ends_on_one(self, which: int) -> None:
        if worker := self.pick(which):
            self.world.end(worker, 0)

    @rule(num=st.integers(1, 5))
    def another_size_is_asked_for(self, num: int) -> None:
        self.world.ask("scale", num_workers=num)

    @rule()
    def they_go_on(self) -> None:
        self.world.enter()
        self.world.take_step()

    @rule()
    def they_go_on_for_a_while(self) -> None:
        self.world.settle(6)

    @rule()
    def they_notice(self) -> None:
        self.world.notice()

    @rule(num=st.integers(1, 30))
    def time_passes(self, num: int) -> None:
        for _ in range(num):
            self.world.beat()

    @rule(which=some)
    @precondition(lambda self: self.world.step > 9)
    def one_finishes(self, which: int) -> None:
        worker = self.pick(which)
        if worker and worker.trains and worker.generation in self.world.formed:
            self.world.finish(worker)

    @rule()
    @precondition(lambda self: self.world.step > 12)
    def all_stop(self) -> None:
        self.world.stop_run("enough")

    @rule()
    @precondition(lambda self: self.world.step > 3 and not self.world.ending)
    def the_coordinator_is_restarted(self) -> None:
        self.world.restart()

    def away(self) -> list[SimWorker]:
        return [
            w
            for w in self.world.workers.values()
            if w.generation and not (w.connected or w.frozen or w.launched or w.done)
        ]

    @precondition(lambda self: self.away())
    @rule(which=some)
    def one_comes_back(self, which: int) -> None:
        away = self.away()
        self.world.reconnect(away[which % len(away)])

    @precondition(lambda self: self.away())
    @rule()
    def all_come_back(self) -> None:
        for worker in self.away():
            self.world.reconnect(worker)

    @invariant()
    def generations_grow_and_hold_the_living(self) -> None:
        if not hasattr(self, "world"):
            return
        for told in self.world.announced[self.checked :]:
            if told.number in self.rosters:
                # Only to say that it holds at once: never with another roster.
                assert self.rosters[told.number] == told.roster
                assert not told.planned
                continue
            assert told.number > max(self.rosters, default=0)
            if not told.roster:
                continue  # the end: nobody meets under that number
            assert sum(told.shares) == 64
            assert len(set(told.roster)) == len(told.roster) == len(told.shares)
            self.rosters[told.number] = told.roster
        self.checked = len(self.world.announced)
        if self.rosters:
            newest = max(self.rosters)
            for name in self.rosters[newest]:
                worker = self.world.workers[name]
                if worker.connected:
                    assert newest in worker.told, "who is concerned is told"

    def comes_to_rest(self) -> None:
        """Left alone, the run ends, pauses, or trains with everybody who can."""
        world = self.world
        world.holds_answers = False
        for _ in range(130):
            world.beat()
        world.settle(400)
        status = world.status()
        if world.ending:
            return
        alive = [w for w in world.workers.values() if w.connected and not w.frozen]
        if status["state"] == "training":
            trained = world.step
            assert world.take_step(), (status, alive)
            assert world.step == trained + 1
            for worker in alive:
                if worker.rests:
                    assert status_of(status, worker.id) == "spare"
                elif worker.said_ready and not worker.goodbye and not worker.done:
                    assert worker.id in world._roster(status["generation"]), (worker, status)
        else:
            assert status["state"] in ("paused", "starting"), (status, alive)
            assert not any(w.said_ready and not w.goodbye and not w.done for w in alive), status


TestMembership = Membership.TestCase
TestMembership.settings = examples(60, stateful_step_count=40)
