"""Those who hang, those who cannot meet, and those who do not leave."""

from __future__ import annotations

import pytest

from evenstep.coordinate.links import cover
from evenstep.coordinate.liveness import LEAVE_S, SAVING_S, STOP_S
from evenstep.messages import (
    Generation,
    Goodbye,
    Listen,
    Listening,
    Reached,
    Refused,
    Stepped,
    Stuck,
)
from evenstep.types import Left, Lost, StepReport
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


def test_a_newcomer_that_hangs_on_its_way_in_is_evicted(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    c = world.join()
    c.frozen = True
    world.settle(100)
    assert roster(world) == (a.id, b.id)
    assert status(world)["state"] == "training"
    assert not c.connected


def test_an_evicted_worker_of_the_launcher_is_ended_and_replaced(make: Make) -> None:
    world = make()
    a, b, c = launched(world, 3)
    b.frozen = True
    world.settle(100)
    assert [e.workers for e in events(world) if isinstance(e, Lost)] == [(b.id,)]
    assert roster(world) == (a.id, c.id, "w3")
    assert not b.launched


def test_workers_that_all_wait_for_each_other_meet_anew(make: Make) -> None:
    world = make()
    a, b, c = training(world, 3)
    before = world.announced[-1]
    complain(world, a, b)
    assert world.announced[-1] == before
    complain(world, c)
    told = world.announced[-1]
    assert (told.roster, told.planned) == (before.roster, False)
    assert told.number > before.number
    complain(world, a, b, c)  # what they said of the old one comes late
    assert world.announced[-1] == told
    world.settle(8)
    assert status(world)["state"] == "training"


def test_workers_that_never_meet_go_on_without_one(make: Make) -> None:
    world = make()
    a, b, c = training(world, 3)
    for _ in range(4):
        assert len(roster(world)) == 3
        for worker in (a, b, c):
            worker.generation = world.announced[-1].number
        complain(world, a, b, c)
    assert roster(world) == (a.id, b.id)
    assert "cannot form a generation" in heard(c, Goodbye)[0].why


def test_nobody_is_evicted_because_the_coordinator_itself_stood_still(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    world.beat()
    world.now_s += 600.0  # nobody was heard of; what they said meanwhile comes one by one
    world.say(a, Stuck(generation=a.generation, step=1, waited_s=6.0))
    world.tick()
    assert b.connected
    assert status(world)["state"] == "training"


# Newcomers that the others do not meet.


def put_off(worker: str, all_events: list[object]) -> int:
    """How often a worker was to be taken in later."""
    return sum(isinstance(e, Left) and worker in e.workers for e in all_events)


def test_a_newcomer_that_the_others_cannot_reach_is_left_out_and_nobody_waits(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    before = world.announced[-1]
    world.holds_answers = True
    c = world.join()
    world.apart.add(c.id)
    for _ in range(5):  # two tests of two rounds each
        world.answer()
        assert world.take_step()
    assert world.announced[-1] == before, "no generation with it was ever announced"
    (refused,) = heard(c, Refused)
    assert refused.why.startswith(f"it and {a.id}, {b.id} cannot connect to each other")
    assert not c.connected


def test_a_newcomer_is_not_blamed_for_a_worker_that_died_while_it_connected(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    world.holds_answers = True
    c = world.join()
    world.answer()  # all listen
    a.frozen = True  # killed, and the coordinator does not know it yet
    world.apart.add(a.id)
    world.answer()  # c cannot connect to a
    assert c.connected
    a.frozen = False
    world.die(a)
    world.holds_answers = False
    world.answer()
    world.settle(8)
    assert roster(world) == (b.id, c.id)
    assert not heard(c, Refused)
    assert world.state.members[c.id].num_failed_tests == 0, "it counts failures in a row"


def test_of_several_newcomers_only_the_one_that_cannot_be_reached_is_left_out(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    world.holds_answers = True
    c, d = world.join(), world.join()
    world.cut_links.add(frozenset((a.id, c.id)))
    world.holds_answers = False
    world.settle(8)
    assert roster(world) == (a.id, b.id, d.id)
    assert status(world)["state"] == "training"
    assert not c.connected


def test_a_launched_newcomer_that_was_left_out_is_replaced_though_nobody_else_trains(
    make: Make,
) -> None:
    """The one that it could not connect to ends, too: that is no failure of the script."""
    world = make(restarts=3)
    (a,) = launched(world, 1)
    world.ask("scale", num_workers=2)
    c = world.connect(world.starting.pop(), launched=True)
    assert c is not None
    world.cut_links.add(frozenset((a.id, c.id)))
    world.ready(c)
    assert not c.connected
    world.die(a)
    world.exited(c.id, 75)
    assert world.ending is None
    assert len(world.starting) == 2


def test_newcomers_that_cannot_reach_a_worker_do_not_displace_it(make: Make) -> None:
    """Though it has the most broken connections of all."""
    world = make()
    a, b = training(world, 2)
    world.holds_answers = True
    c, d = world.join(), world.join()
    world.cut_links |= {frozenset((a.id, c.id)), frozenset((a.id, d.id))}
    world.holds_answers = False
    world.settle(8)
    assert roster(world) == (a.id, b.id)
    assert not any(worker.connected for worker in (c, d))


def test_a_worker_that_leaves_meanwhile_does_not_keep_a_newcomer_out(make: Make) -> None:
    world = make()
    a, b, c = training(world, 3)
    world.holds_answers = True
    d = world.join()
    ask(world, "drain", worker=c.id)  # announced: it is out of the newest roster
    world.cut_links.add(frozenset((c.id, d.id)))
    world.holds_answers = False
    world.settle(8)
    assert roster(world) == (a.id, b.id, d.id)
    assert status(world)["state"] == "training"


def test_a_leaver_that_another_worker_cannot_connect_to_any_more_goes_at_once(make: Make) -> None:
    world = make()
    a, b, c = training(world, 3)
    ask(world, "drain", worker=c.id)
    world.formed.clear()  # their connections broke: all wait for each other
    world.cut_links.add(frozenset((a.id, c.id)))
    complain(world, a, b, c)
    world.settle(40)
    assert roster(world) == (a.id, b.id)
    assert not c.connected
    assert status(world)["state"] == "training"


def test_a_newcomer_that_hangs_holds_neither_the_others_nor_the_next_newcomer_up(
    make: Make,
) -> None:
    world = make()
    a, b = training(world, 2)
    world.holds_answers = True
    c = world.join()
    c.frozen, world.holds_answers = True, False
    d = world.join()
    world.settle(40)
    assert all(c.id not in g.roster for g in world.announced)
    assert roster(world) == (a.id, b.id, d.id)
    assert "did not answer 3 times" in heard(c, Refused)[0].why


def test_a_busy_script_does_not_keep_a_newcomer_from_being_tested(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    b.busy = True
    c = world.join()
    assert roster(world) == (a.id, b.id, c.id)


def test_a_newcomer_that_is_cut_off_after_its_test_fails_only_its_own_joins(make: Make) -> None:
    """Twice it cannot meet the others, who are connected by then; later it starts from zero."""
    world = make()
    a, b = training(world, 2)
    c = world.join()
    for _ in range(2):
        for worker in (a, b, c):
            worker.generation = world.announced[-1].number
        complain(world, a, b, c)
        world.enter()
        world.take_step()
    assert put_off(c.id, events(world)) == 2
    world.settle(8)
    assert roster(world) == (a.id, b.id, c.id)
    for _ in range(3):
        for worker in (a, b, c):
            worker.generation = world.announced[-1].number
        complain(world, a, b, c)
        assert roster(world) == (a.id, b.id, c.id)


# Connections that break.


def test_of_two_that_cannot_connect_any_more_the_later_goes_in_seconds(make: Make) -> None:
    world = make()
    a, b, c = training(world, 3)
    world.cut_links.add(frozenset((a.id, b.id)))
    complain(world, a, b)  # c waits as well, and has not said so yet
    began_s = world.now_s
    while b.connected:
        world.beat()
    assert world.now_s - began_s < 10.0
    world.settle(8)
    assert roster(world) == (a.id, c.id)
    assert "it and w0 cannot connect to each other" in heard(b, Goodbye)[0].why


def test_of_two_that_cannot_connect_the_one_that_is_to_leave_goes(make: Make) -> None:
    """It is still in the step with the others, but in the roster no more."""
    world = make()
    a, b, c = training(world, 3)
    ask(world, "drain", worker=a.id)
    world.cut_links.add(frozenset((a.id, c.id)))
    complain(world, a, b, c)
    while a.connected:
        world.beat()
    world.settle(8)
    assert roster(world) == (b.id, c.id)
    assert b.connected
    assert c.connected


def test_a_worker_cut_off_from_all_others_goes_alone(make: Make) -> None:
    world = make()
    a, b, c, d = training(world, 4)
    world.apart.add(a.id)  # the first in rank
    complain(world, a, b, c, d)
    world.settle(8)
    assert roster(world) == (b.id, c.id, d.id)
    assert not a.connected


def test_a_first_generation_that_cannot_form_goes_on_without_the_unreachable(make: Make) -> None:
    world = make()
    workers = [world.connect() for _ in range(3)]
    a, b, c = (w for w in workers if w is not None)
    world.apart.add(b.id)
    for worker in (a, b, c):
        world.ready(worker)
    world.settle(100)
    assert roster(world) == (a.id, c.id)
    assert status(world)["state"] == "training"


def test_a_report_for_an_earlier_test_does_not_count(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    world.holds_answers = True
    c = world.join()
    (listen,) = heard(c, Listen)
    for worker in (a, b, c):
        world.say(worker, Reached(probe=listen.probe, unreached=("w0", "w1", "w2")))
        world.say(worker, Listening(probe="0.0", host="10.0.0.1", port=1))
    world.answer()
    world.say(a, Reached(probe="0.0", unreached=(c.id,)))
    world.answer()
    assert roster(world) == (a.id, b.id, c.id)


def test_workers_that_cannot_listen_are_taken_to_be_reachable(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    world.holds_answers = True
    c = world.join()
    (listen,) = heard(c, Listen)
    world.say(a, Listening(probe=listen.probe))
    world.say(b, Listening(probe=listen.probe, host="not an address", port=1))
    world.say(c, Listening(probe=listen.probe, host="10.0.0.9", port=1))
    assert roster(world) == (a.id, b.id, c.id)


@pytest.mark.parametrize(
    ("links", "joiners", "expected"),
    [
        ("", "", ""),
        ("ab", "", "b"),
        ("ab ac ad", "", "a"),
        ("ab cd", "", "db"),
        ("ac ad", "cd", "dc"),
        ("ab bc", "c", "cb"),
    ],
)
def test_the_fewest_go_and_newcomers_first(links: str, joiners: str, expected: str) -> None:
    assert "".join(cover({frozenset(x) for x in links.split()}, "abcd", joiners)) == expected


# Newcomers that are put off.


def test_a_newcomer_is_not_blamed_for_those_who_have_not_come_to_it(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    c = world.join()
    for _ in range(3):
        assert roster(world) == (a.id, b.id, c.id)  # announced, and not passed on yet
        complain(world, a, b)
        assert roster(world) == (a.id, b.id)
        world.enter()
    assert c.connected


def test_one_that_had_caught_up_when_it_was_put_off_still_comes(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    c = world.join()
    c.generation, c.begun, c.lost = c.newest, True, True  # and nobody has told the coordinator
    world.die(b)
    world.settle(20)
    assert roster(world) == (a.id, c.id)
    assert status(world)["state"] == "training"
    assert [g.planned for g in heard(a, Generation)][-1]
    assert not heard(c, Generation)[-1].planned


# Those who do not leave.


def until_the_end(world: World) -> float:
    """Until the run has ended; how long it took, on the run's own clock."""
    begun_s = world.now_s
    while world.ending is None and world.now_s < begun_s + 2 * SAVING_S:
        world.settle(1)
    return world.now_s - begun_s


def test_one_stuck_in_the_script_does_not_hold_a_stop_up(make: Make) -> None:
    world = make()
    a, b, c = launched(world, 3)
    b.busy = True
    world.stop_run("enough")
    assert [g.planned for g in heard(a, Generation) if not g.roster] == [True]
    took_s = until_the_end(world)
    assert [g.planned for g in heard(a, Generation) if not g.roster] == [True, False]
    assert heard(b, Goodbye)[0].why == "it does not leave"
    assert ending(world).ok
    assert STOP_S + LEAVE_S < took_s < STOP_S + LEAVE_S + 5
    assert not any(w.connected for w in (a, b, c))


def test_a_leader_that_writes_the_last_checkpoint_gets_more_time(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    a.busy = a.saving = True
    world.stop_run("enough")
    assert SAVING_S <= until_the_end(world) < SAVING_S + 5
    assert heard(a, Goodbye)[0].why == "it does not leave"
    assert not heard(b, Goodbye)


def test_a_leader_that_does_not_get_to_the_last_checkpoint_is_not_waited_for(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world = make()
    a, b = training(world, 2)
    a.busy = b.busy = True  # asleep
    world.stop_run("enough")
    assert until_the_end(world) < STOP_S + LEAVE_S + 5
    assert ending(world).ok
    assert f"{a.id} does not leave: no checkpoint of the last steps" in caplog.text


def test_a_stop_waits_for_two_usual_steps(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    reports = tuple(StepReport(w.id, 32, 60.0) for w in (a, b))
    for _ in range(20):
        number, step = a.generation, world.step
        world.say(a, Stepped(generation=number, step=step, seconds=60.0, reports=reports))
        world.step += 1
    a.busy = b.busy = True
    world.stop_run("enough")
    for _ in range(200):
        world.beat()
    assert [g.planned for g in heard(a, Generation) if not g.roster] == [True]
    a.busy = b.busy = False
    world.settle(8)
    assert ending(world).ok


def test_a_change_that_does_not_come_about_does_not_hold_a_stop_up(make: Make) -> None:
    world = make()
    a, b, c = training(world, 3)
    b.busy = c.busy = True  # of two it cannot be told who holds the other up
    world.join()
    world.stop_run("enough")
    assert len(roster(world)) == 4  # it is announced, and its step does not end
    until_the_end(world)
    assert ending(world).ok
    assert not any(w.connected for w in (a, b, c))


def test_a_stop_is_not_hurried_because_the_coordinator_itself_stood_still(make: Make) -> None:
    world = make()
    a, _ = training(world, 2)
    world.beat()
    world.stop_run("enough")
    world.now_s += 600.0
    world.tick()
    assert [g.planned for g in heard(a, Generation) if not g.roster] == [True]
    world.settle(20)
    assert ending(world).ok
