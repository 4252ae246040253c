"""Lost workers that may train on: nobody begins anew beside them before their lease is over."""

from __future__ import annotations

import pytest

from evenstep.coordinate.events import Terms
from tests.coordinate.situations import Make, ask, launched, roster, status, training
from tests.coordinate.world import SimWorker, World

LEASE_S = 20.0


def break_off(world: World, *workers: SimWorker) -> None:
    """Their connections time out, at the coordinator; they train on."""
    for worker in workers:
        worker.connected = False
        world.disconnected(worker.id, broken=True)


def trains(world: World, worker: SimWorker) -> bool:
    world.settle(3)
    return status(world)["state"] == "training" and worker.id in roster(world)


def test_nobody_begins_anew_while_those_before_may_train_on(make: Make) -> None:
    world = make(lease_s=LEASE_S)
    a, b = training(world, 2)
    break_off(world, a, b)
    c = world.join()
    assert not trains(world, c)
    while world.now_s < LEASE_S:
        world.beat()
        assert roster(world) != (c.id,)
    world.settle(10)
    assert trains(world, c)


def test_a_newcomer_that_was_announced_does_not_begin_anew_either(make: Make) -> None:
    world = make(lease_s=LEASE_S)
    (a,) = training(world, 1)
    c = world.join()
    assert roster(world) == (a.id, c.id)
    break_off(world, a)
    assert not trains(world, c)


@pytest.mark.parametrize("how", ["closed", "exited", "given_up"])
def test_once_one_of_them_is_known_to_have_ended_they_are_not_waited_for(
    make: Make, how: str
) -> None:
    """The one that was left last: the others cannot take a step without it."""
    world = make()
    a, b = training(world, 2)
    break_off(world, a)
    if how == "closed":
        world.die(b)
    else:
        break_off(world, b)
        c = world.join()
        assert not trains(world, c)
        if how == "exited":
            world.exited(b.id, 75)
        else:
            assert not ask(world, "drain", worker=b.id).problem
    assert trains(world, world.join())


def test_those_who_stay_go_on_at_once(make: Make) -> None:
    world = make()
    a, b, c = training(world, 3)
    break_off(world, a, b)
    assert trains(world, c)
    world.die(c)  # it had left the others: they cannot train
    assert trains(world, world.join())


def test_another_coordinator_waits_too(make: Make) -> None:
    world = make(lease_s=LEASE_S)
    a, b = training(world, 2)
    break_off(world, a, b)
    world.restart()
    c = world.join()
    assert not trains(world, c)
    while world.now_s < LEASE_S + Terms().silence_s:
        world.beat()
    world.settle(10)
    assert trains(world, c)


def ending_unheard(world: World) -> SimWorker:
    """The end is announced to a worker that does not hear of it, and the coordinator dies."""
    (a,) = training(world, 1)
    a.frozen = True
    world.stop_run("enough")
    world.restart()
    return a


def test_a_run_that_was_stopping_does_not_go_on_beside_a_worker_that_has_not_heard(
    make: Make,
) -> None:
    world = make(lease_s=LEASE_S)
    ending_unheard(world)
    c = world.join()
    assert not trains(world, c)
    while world.now_s < LEASE_S + Terms().silence_s:
        world.beat()
    world.settle(10)
    assert trains(world, c)


def test_a_run_that_was_stopping_goes_on_at_once_if_its_workers_have_ended(make: Make) -> None:
    world = make(lease_s=LEASE_S)
    (a,) = launched(world, 1)
    a.frozen = True
    world.stop_run("enough")
    world.restart(ended=(a.id,))
    assert trains(world, world.join())


def test_a_run_that_ended_without_a_silent_worker_is_not_resumed_beside_it(make: Make) -> None:
    world = make(lease_s=LEASE_S)
    (a,) = training(world, 1)
    a.frozen = True
    world.stop_run("enough")
    while world.ending is None:
        world.beat()
    world.restart()
    assert not trains(world, world.join())


def test_nor_is_one_that_ended_while_it_waited_for_its_workers(make: Make) -> None:
    world = make(lease_s=LEASE_S)
    (a,) = training(world, 1)
    a.frozen = True
    world.restart()
    world.kill_run("enough")
    world.restart()
    assert not trains(world, world.join())
