"""A coordinator that goes on where one before it stopped: who stays, who goes, who is started."""

from __future__ import annotations

import pytest

from evenstep.coordinate.events import Terms
from evenstep.messages import Goodbye
from evenstep.types import Lost
from tests.coordinate.situations import (
    Make,
    ask,
    complain,
    ending,
    events,
    heard,
    launched,
    roster,
    status,
    training,
)
from tests.coordinate.world import World


def restart(world: World, *ended: str) -> None:
    """Another coordinator adopts the processes that still run."""
    for name in ended:
        world.workers[name].launched = False
    world.restart(ended)
    for worker in world.workers.values():
        if worker.launched:
            world.adopt(worker.id)


def all_back(world: World) -> None:
    """Whoever trained looks for the coordinator, and finds it."""
    for worker in world.workers.values():
        if worker.launched:
            world.reconnect(worker)
    world.settle(8)


def test_one_who_was_asked_to_leave_is_asked_again(make: Make) -> None:
    world = make()
    a, b, c = training(world, 3)
    d = world.join()  # a change is under way, so that the leave has to wait
    ask(world, "drain", worker=b.id)
    assert b.id in roster(world)
    world.restart()
    for worker in (a, b, c, d):
        world.reconnect(worker)
    world.settle(20)
    assert roster(world) == (a.id, c.id, d.id)
    assert status(world)["state"] == "training"
    assert not b.connected


def test_a_generation_that_was_forming_is_not_taken_for_one_that_trains(make: Make) -> None:
    """A planned change would wait for the end of a step, which nobody takes."""
    world = make()
    a, b, c = training(world, 3)
    d = world.join()
    world.apart.add(d.id)
    world.settle(3)
    assert {w.generation for w in (a, b, c, d)} - world.formed, "it must not have formed"
    world.restart()
    world.apart.clear()
    for worker in (a, b, c, d):
        world.reconnect(worker)
    world.leave(b)
    announced = world.announced[-1]
    assert not announced.planned
    world.settle(8)
    assert set(roster(world)) == {a.id, c.id, d.id}


def test_spares_and_leavers_of_before_are_not_replaced(make: Make) -> None:
    world = make(spares=1)
    launched(world, 4)
    ask(world, "scale", num_workers=3)
    world.settle(8)
    ask(world, "drain", worker="w2")  # announced, and it takes its last step with the others
    restart(world)
    world.start_run(4)
    all_back(world)
    for name in ("w2", "w3"):
        world.end(world.workers[name], 75)
    world.settle(8)
    assert roster(world) == ("w0", "w1", "w1000")  # three were asked for
    assert status(world)["restarts_left"] == Terms().restarts


def test_as_many_are_started_as_were_last_asked_for(make: Make) -> None:
    world = make()
    launched(world, 2)
    ask(world, "scale", num_workers=4)
    world.settle(8)
    restart(world, "w3")
    world.start_run(2)
    assert len(world.starting) == 1
    all_back(world)
    assert roster(world) == ("w0", "w1", "w2", "w1000")


def test_those_from_elsewhere_count_as_workers_of_the_size_asked_for(make: Make) -> None:
    world = make()
    launched(world, 1)
    world.join()
    world.settle(8)
    ask(world, "scale", num_workers=3)
    world.settle(8)
    restart(world)
    world.start_run(1)
    assert world.starting == []


@pytest.mark.parametrize("num", [3, 6])
def test_a_number_asked_for_anew_counts_for_more_than_the_last_one(make: Make, num: int) -> None:
    world = make()
    launched(world, 2)
    ask(world, "scale", num_workers=4)
    world.settle(8)
    restart(world)
    world.start_run(num, True)
    all_back(world)
    world.settle(20)
    assert len(roster(world)) == num
    assert status(world)["state"] == "training"


def test_a_stop_does_not_wait_for_those_who_are_away(make: Make) -> None:
    world = make()
    a, b = launched(world, 2)
    restart(world)
    world.reconnect(a)
    assert status(world)["state"] == "waiting for workers to come back"
    world.stop_run("enough")
    assert world.stopped == [b.id]
    world.settle(20)
    assert ending(world).ok
    assert [e.workers for e in events(world) if isinstance(e, Lost)] == [(b.id,)]
    assert world.step > 0
    assert [g.roster for g in world.announced[-2:]] == [(a.id,), ()]  # a step's end, a checkpoint


def test_a_stop_while_all_are_away_is_the_end(make: Make) -> None:
    world = make()
    a, _ = training(world, 2)
    world.restart()
    world.stop_run("enough")
    assert ending(world).ok
    assert not heard(a, Goodbye)


def test_one_that_needs_those_who_are_away_while_others_have_finished_goes_on(make: Make) -> None:
    world = make()
    a, b, c = training(world, 3)
    world.restart()
    world.reconnect(a)
    world.reconnect(b)
    world.finish(a)
    complain(world, b)
    assert roster(world) == (b.id,)
    world.settle(8)
    assert status(world)["state"] == "training"
    assert not world.reconnect(c)  # it was given up
    world.finish(b)
    assert ending(world).ok


def test_numbers_under_which_the_end_was_announced_are_not_used_again(make: Make) -> None:
    """One of those who were asked to leave may still be on its way."""
    world = make(lease_s=20.0)
    training(world, 2)
    world.stop_run("enough")
    for _ in range(20):
        world.beat()  # the step in flight does not end: all are to leave at once
    ends = [g.number for g in world.announced if not g.roster]
    assert len(ends) == 2
    world.restart()
    while world.state.doubts:  # they may train on until then
        world.beat()
    training(world, 1)
    assert world.announced[-1].number > max(ends)


def test_workers_that_end_before_they_join_are_replaced_if_nobody_trains(make: Make) -> None:
    """As after a damaged journal: workers that outlived it are refused, and end by themselves."""
    world = make(restarts=3)
    (a,) = launched(world, 1)
    world.ask("scale", num_workers=3)
    starting = [world.connect(world.starting.pop(), launched=True) for _ in range(2)]
    restart(world, a.id)
    world.ask("scale", num_workers=2)
    world.start_run(2)  # both still run
    assert not world.starting
    for worker in starting:
        assert worker is not None
        world.exited(worker.id, 75)
        assert world.ending is None
    assert len(world.starting) == 2
