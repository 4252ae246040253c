"""Workers out of the roster that stay ready: when they come back, and when they go."""

from __future__ import annotations

from evenstep.coordinate.events import Terms
from evenstep.messages import Generation, Goodbye, Leaving
from tests.coordinate.situations import (
    Make,
    ask,
    ending,
    heard,
    launched,
    roster,
    states,
    status,
    training,
)
from tests.coordinate.world import SimWorker, World


def with_a_spare(world: World) -> list[SimWorker]:
    """Two that train, and one that stays ready."""
    workers = launched(world, 3)
    ask(world, "scale", num_workers=2)
    world.settle(8)
    assert states(world) == {"w0": "training", "w1": "training", "w2": "spare"}
    return workers


def test_one_who_is_scaled_away_stays_ready_and_comes_back(make: Make) -> None:
    world = make(spares=1)
    launched(world, 3)
    ask(world, "scale", num_workers=2)
    world.settle(8)
    told = world.announced[-1]
    assert (told.roster, told.spares) == (("w0", "w1"), ("w2",))
    assert [w["state"] for w in status(world)["workers"]] == ["training", "training", "spare"]
    ask(world, "scale", num_workers=3)
    world.settle(8)
    assert world.announced[-1].roster == ("w0", "w1", "w2")
    assert world.starting == []
    assert all(w["state"] == "training" for w in status(world)["workers"])


def test_there_are_no_more_spares_than_asked_for(make: Make) -> None:
    world = make(spares=1)
    launched(world, 4)
    ask(world, "scale", num_workers=1)
    world.settle(8)
    assert [w["state"] for w in status(world)["workers"]].count("spare") == 1
    assert sum(w.connected for w in world.workers.values()) == 2


def test_one_who_is_drained_by_name_does_not_stay(make: Make) -> None:
    world = make(spares=1)
    launched(world, 3)
    ask(world, "drain", worker="w1")
    world.settle(8)
    assert world.announced[-1].spares == ()
    assert not world.workers["w1"].connected


def test_a_spare_takes_the_place_of_one_who_dies(make: Make) -> None:
    world = make(spares=1)
    launched(world, 3)
    ask(world, "scale", num_workers=2)
    world.settle(8)
    world.die(world.workers["w1"])
    world.settle(8)
    assert world.announced[-1].roster == ("w0", "w2")
    assert status(world)["restarts_left"] == Terms().restarts  # nobody was started for it
    assert world.starting == []


def test_a_spare_takes_the_place_of_the_last_one_who_leaves(make: Make) -> None:
    world = make(spares=1)
    launched(world, 2)
    ask(world, "scale", num_workers=1)
    world.settle(8)
    world.say(world.workers["w0"], Leaving(why="SIGTERM"))
    world.settle(8)
    assert roster(world) == ("w1",)
    assert states(world)["w1"] == "training"


def test_a_spare_that_dies_is_missed_by_nobody(make: Make) -> None:
    world = make(spares=1)
    launched(world, 3)
    ask(world, "scale", num_workers=2)
    world.settle(8)
    before = len(world.announced)
    world.die(world.workers["w2"])
    world.settle(8)
    assert (len(world.announced), world.state.restarts_left) == (before, 3)


def test_spares_go_with_the_run(make: Make) -> None:
    world = make(spares=1)
    a, b, spare = launched(world, 3)
    ask(world, "scale", num_workers=2)
    world.settle(8)
    world.finish(a)
    world.finish(b)
    world.settle(8)
    assert ending(world).ok
    assert heard(spare, Goodbye)


def test_a_spare_comes_though_no_restarts_are_left(make: Make) -> None:
    world = make(spares=1, restarts=0, sets=("workers.min=2",))
    _, b, _ = with_a_spare(world)
    world.die(b)
    assert status(world)["state"] == "regrouping"  # the spare is called at once
    world.settle(8)
    assert roster(world) == ("w0", "w2")
    assert status(world)["state"] == "training"


def test_a_spare_takes_the_place_of_one_who_had_joined_from_elsewhere(make: Make) -> None:
    world = make(spares=1)
    _, b, _ = training(world, 3)
    ask(world, "scale", num_workers=2)
    world.settle(8)
    world.die(b)
    world.settle(8)
    assert roster(world) == ("w0", "w2")
    assert world.starting == []


def test_a_spare_comes_where_one_leaves_and_too_few_would_be_left(make: Make) -> None:
    world = make(spares=1, sets=("workers.min=2",))
    _, b, _ = with_a_spare(world)
    world.leave(b)
    world.settle(8)
    assert roster(world) == ("w0", "w2")
    assert status(world)["state"] == "training"


def test_no_more_spares_come_than_are_lacking(make: Make) -> None:
    world = make(spares=2, restarts=0, sets=("workers.min=2",))
    launched(world, 4)
    ask(world, "scale", num_workers=2)
    world.settle(8)
    world.die(world.workers["w1"])
    world.settle(8)
    assert len(roster(world)) == 2
    assert list(states(world).values()).count("spare") == 1


def test_nobody_comes_in_place_of_one_who_was_leaving(make: Make) -> None:
    world = make(spares=1)
    _, b, _ = with_a_spare(world)
    world.join()  # a change is under way, so that the leave has to wait
    assert world.ask("drain", worker=b.id).problem == ""
    world.die(b)
    assert states(world)["w2"] == "spare"


def test_a_script_that_fails_is_a_failure_though_a_spare_has_come(make: Make) -> None:
    world = make(spares=1)
    _, b, _ = with_a_spare(world)
    world.end(b, 3)
    assert ending(world).why == "w1 ended with exit code 3"


def test_a_spare_goes_when_an_operator_lets_it_go(make: Make) -> None:
    world = make(spares=1)
    *_, spare = with_a_spare(world)
    assert ask(world, "drain", worker="w2").problem == ""
    assert heard(spare, Goodbye)
    world.settle(8)
    assert not spare.connected
    assert roster(world) == ("w0", "w1")


def test_a_spare_goes_when_it_is_told_to_itself(make: Make) -> None:
    world = make(spares=1)
    *_, spare = with_a_spare(world)
    world.leave(spare)
    assert heard(spare, Goodbye)
    world.settle(8)
    assert not spare.connected
    assert status(world)["restarts_left"] == Terms().restarts


def test_a_spare_that_comes_back_is_a_joiner_as_others_are(make: Make) -> None:
    world = make(spares=1)
    _, b, spare = with_a_spare(world)
    ask(world, "scale", num_workers=3)
    assert roster(world) == ("w0", "w1", "w2")
    assert world.announced[-1].planned
    assert not heard(spare, Generation)[-1].planned  # nobody passes it on to it
    world.die(b)
    assert roster(world) == ("w0",)  # in a step, of which the spare knows nothing
    world.settle(8)
    assert set(roster(world)) >= {"w0", "w2"}
