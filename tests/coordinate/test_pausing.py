"""A coordinator without workers of its own: it waits for joiners, also after the last one left."""

from __future__ import annotations

from evenstep.messages import Generation, Goodbye, Leaving, Refused
from tests.coordinate.situations import (
    Make,
    ask,
    ending,
    heard,
    roster,
    states,
    status,
    training,
)


def test_it_says_that_it_waits_for_workers_to_join(make: Make) -> None:
    world = make(awaits_joiners=True)
    world.start_run(0)
    world.settle(8)
    assert status(world)["state"] == "starting"
    assert "start them by `evenstep join`" in status(world)["reason"]
    training(world, 1)
    assert status(world)["reason"] == ""


def test_the_last_worker_leaves_with_a_checkpoint_and_the_run_goes_on_with_the_next(
    make: Make,
) -> None:
    world = make(awaits_joiners=True, run="/runs/a")
    only = training(world, 1)[0]
    world.say(only, Leaving(why="SIGTERM"))
    world.settle(8)
    last = heard(only, Generation)[-1]
    assert (last.roster, last.saves) == ((), only.id)
    assert not only.connected
    assert (status(world)["state"], world.ending) == ("paused", None)
    assert "SIGTERM" in status(world)["reason"]
    assert not world.stopping  # no note is left for a coordinator that takes over

    training(world, 1)
    assert world.announced[-1].number > last.number


def test_workers_that_come_while_the_last_one_leaves_are_sent_to_try_again(make: Make) -> None:
    world = make(awaits_joiners=True)
    only = training(world, 1)[0]
    early = world.connect()
    assert early is not None
    only.busy = True
    world.say(only, Leaving(why="SIGTERM"))
    assert heard(early, Goodbye)  # it was told of an older checkpoint
    refused = world.hello()
    assert isinstance(refused, Refused)
    assert refused.why == "the last workers are leaving; try again"
    only.busy = False
    world.settle(8)
    assert status(world)["state"] == "paused"


def test_a_run_that_is_stopped_while_its_last_worker_leaves_ends(make: Make) -> None:
    world = make(awaits_joiners=True)
    only = training(world, 1)[0]
    only.busy = True
    world.say(only, Leaving(why="SIGTERM"))
    world.stop_run("Ctrl-C")
    only.busy = False
    world.settle(8)
    assert ending(world).ok
    assert ending(world).why == "stopped: Ctrl-C"


def test_a_run_whose_last_worker_ends_its_script_instead_of_leaving_is_trained(
    make: Make,
) -> None:
    world = make(awaits_joiners=True)
    only = training(world, 1)[0]
    only.busy = True
    world.say(only, Leaving(why="SIGTERM"))
    world.finish(only)
    world.settle(8)
    assert (ending(world).ok, ending(world).why) == (True, "trained to the end")
    assert status(world)["trained_to_end"]


def test_the_end_tells_workers_whether_anything_is_left_to_train(make: Make) -> None:
    world = make(awaits_joiners=True)
    first = training(world, 1)[0]
    late = world.connect()
    assert late is not None
    world.finish(first)
    world.settle(8)
    assert [m.trained for m in heard(late, Goodbye)] == [True]
    later = world.hello()
    assert isinstance(later, Refused)
    assert later.trained


def test_a_run_that_is_stopped_has_something_left_to_train(make: Make) -> None:
    world = make()
    workers = training(world, 2)
    world.stop_run("Ctrl-C")
    world.settle(8)
    assert not status(world)["trained_to_end"]
    assert not any(m.trained for w in workers for m in heard(w, Goodbye))


def test_without_its_own_workers_a_run_that_lost_all_waits(make: Make) -> None:
    world = make(awaits_joiners=True)
    world.start_run(0)
    world.settle(2)
    only = training(world, 1)[0]
    world.die(only)
    world.settle(8)
    assert (status(world)["state"], world.ending) == ("paused", None)
    training(world, 2)


def test_a_run_with_workers_of_its_own_ends_with_the_last_one(make: Make) -> None:
    world = make()
    only = training(world, 1)[0]
    world.say(only, Leaving(why="SIGTERM"))
    world.settle(8)
    assert ending(world).why == "stopped: all workers leave: SIGTERM"
    assert roster(world) == ()
    assert states(world) == {only.id: "gone"}


def test_a_size_asked_for_before_a_resume_starts_nothing(make: Make) -> None:
    world = make(awaits_joiners=True)
    training(world, 2)
    ask(world, "scale", num_workers=3)
    world.restart()
    world.start_run(0, explicit=True)
    assert world.starting == []
