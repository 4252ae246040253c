"""Workers that say what cannot be true: they are left out, and the others train on."""

from __future__ import annotations

import pytest

from evenstep.coordinate.steps import FASTEST_S
from evenstep.errors import InvalidInputError
from evenstep.messages import MOST, Began, Done, FromClient, Goodbye, Stepped
from evenstep.types import StepReport, Steps
from tests.coordinate.situations import Make, ask, heard, launched, roster, states, status, training
from tests.coordinate.world import SimWorker, World


def report(world: World, leader: SimWorker, step: int, **changes: object) -> Stepped:
    told = leader.told[leader.generation]
    reports = tuple(StepReport(w, s, 0.1) for w, s in zip(told.roster, told.shares, strict=True))
    message = Stepped(generation=told.number, step=step, seconds=0.1, reports=reports)
    return Stepped(**{f: getattr(message, f) for f in message.__struct_fields__} | changes)


def goes_on(world: World, *workers: SimWorker) -> bool:
    """These train on, and the run can be changed."""
    world.settle(8)
    assert status(world)["state"] == "training"
    assert not ask(world, "scale", num_workers=len(workers) + 1).problem
    new = world.join()
    world.settle(8)
    return roster(world) == (*(w.id for w in workers), new.id)


@pytest.mark.parametrize("step", [10**15, MOST, 10**9])
def test_a_joiner_that_is_done_after_impossibly_many_steps_is_left_out(
    make: Make, step: int
) -> None:
    world = make()
    a, b, c = training(world, 3)
    world.say(c, Done(step=step))
    (goodbye,) = heard(c, Goodbye)
    assert f"it says that it is at step {step}, which cannot be" in goodbye.why
    assert status(world)["left_out"] == {c.id: goodbye.why}
    assert goes_on(world, a, b)


def test_a_worker_that_is_done_while_the_others_do_not_get_there_is_left_out(make: Make) -> None:
    """The number may be true, and what the others report for longer than a delay says it is not."""
    world = make(patience_s=5.0)
    a, b, c = training(world, 3)
    world.say(c, Done(step=world.step + 1000))
    assert states(world)[c.id] == "done"
    began_s = world.now_s
    while c.connected:
        assert world.now_s < began_s + 10.0
        world.take_step()
        world.beat()
    assert world.now_s > began_s + 5.0
    assert "trained to the end, step" in heard(c, Goodbye)[0].why
    assert goes_on(world, a, b)


def test_a_worker_that_is_done_and_trains_on_past_that_step_is_left_out(make: Make) -> None:
    world = make()
    a, b, c = launched(world, 3)
    world.say(c, Done(step=world.step))
    world.take_step()
    assert "ended at step" in heard(c, Goodbye)[0].why
    world.settle(8)
    assert not c.launched
    assert roster(world) == (a.id, b.id, "w3")
    assert status(world)["restarts_left"] == 2


def test_reports_that_come_late_contradict_nobody(make: Make) -> None:
    """The leader's connection stood still; what it reports is older than the others' end."""
    world = make(patience_s=5.0)
    a, b = training(world, 2)
    late = [report(world, a, world.step + i) for i in range(3)]
    world.step += 3
    world.finish(b)
    for _ in range(8):
        world.beat()
    world.now_s += 60.0
    for message in late:
        world.say(a, message)
    world.finish(a)
    assert world.ending is not None
    assert world.ending.ok
    assert status(world)["left_out"] == {}


def test_as_many_steps_as_a_lease_has_room_for_are_believed(make: Make) -> None:
    world = make(lease_s=60.0)
    a, b = training(world, 2)
    step = world.step + int(60.0 / FASTEST_S)
    for worker in (a, b):
        world.say(worker, Done(step=step))
    assert world.ending is not None
    assert world.ending.ok


def test_steps_taken_under_the_lease_of_an_earlier_coordinator_are_believed(make: Make) -> None:
    world = make(lease_s=1.0)
    a, b = training(world, 2)
    world.restart(lease_s=1000.0)
    for worker in (a, b):
        assert world.reconnect(worker)
    for worker in (a, b):
        world.say(worker, Done(step=int(1000.0 / FASTEST_S)))
    assert world.ending is not None
    assert world.ending.ok


def test_a_leader_that_begins_at_an_impossible_step_is_left_out(make: Make) -> None:
    world = make()
    a, b, c = training(world, 3)
    world.die(c)
    number = world.announced[-1].number
    world.say(a, Began(generation=number, step=10**15))
    assert "cannot be" in heard(a, Goodbye)[0].why
    assert goes_on(world, b)
    assert status(world)["step"] < 1000


def test_a_leader_that_reports_an_impossible_step_is_left_out(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    world.say(a, report(world, a, 10**15))
    assert "cannot be" in heard(a, Goodbye)[0].why
    assert goes_on(world, b)
    assert status(world)["step"] < 1000


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"step": 0}, "comes after step"),
        ({"reports": ()}, "is not of its roster: w0, w1"),
        ({"reports": (StepReport("w0", 32, 0.1), StepReport("w7", 32, 0.1))}, "not of its roster"),
        ({"quiet": Steps(num=10**15, seconds=1.0)}, "comes after 1000000000000000 steps"),
        ({"earlier": Steps(num=10**15, seconds=1.0)}, "comes after 1000000000000000 steps"),
        ({"nonfinite": ("w7",)}, "who are not all in its roster"),
        ({"position": 10**15}, "ends at sample 1000000000000000, of 64 a step"),
    ],
)
def test_a_report_that_cannot_be_true_changes_nothing(
    make: Make, changes: dict[str, object], problem: str
) -> None:
    world = make()
    a, b = training(world, 2)
    before = world.state
    message: FromClient = report(world, a, **{"step": world.step, **changes})  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=problem):
        world.say(a, message)
    assert world.state is before
    assert goes_on(world, a, b)


def test_a_checkpoint_says_where_a_run_without_a_journal_begins(make: Make) -> None:
    world = make(lease_s=1.0)
    world.step = 90_000_000
    worker = world.connect(checkpoint="runs/a/checkpoints/step-90000000.pt")
    assert worker is not None
    world.ready(worker)
    world.settle(8)
    assert status(world)["state"] == "training"
    assert status(world)["step"] >= world.step - 1
