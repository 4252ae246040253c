"""What the coordinator does in one situation at a time, without sockets or processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bench.testbed.disk import small_disk

from evenstep.coordinate.events import Connected, Ending, Heard
from evenstep.coordinate.membership import MAX_PUBLISHED
from evenstep.messages import (
    Began,
    Done,
    Failed,
    Generation,
    Goodbye,
    NewPlan,
    Paused,
    Publish,
    Refused,
    Stepped,
    Stuck,
    Welcome,
)
from evenstep.types import LaunchFailed, Left, Lost, StepReport, Steps
from tests.coordinate.replayed import replayed
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
from tests.coordinate.world import SimWorker, World

GROWS = {
    "batch": 0,
    "per_worker": 1,
    "limit": 2,
    "settings": {"batch": {"per_worker": 1, "limit": 2}},
}

# The beginning.


def test_the_first_workers_begin_together(make: Make) -> None:
    world = make()
    world.start_run(3)
    for name in reversed(world.starting):
        assert world.announced == []
        worker = world.connect(name, launched=True)
        assert worker is not None
        world.ready(worker)
    assert [g.roster for g in world.announced] == [("w0", "w1", "w2")]
    assert world.announced[0].planned


def test_the_first_workers_are_not_waited_for_without_end(make: Make) -> None:
    world = make()
    world.start_run(2)
    worker = world.connect("w0", launched=True)
    assert worker is not None
    world.ready(worker)
    for _ in range(10):
        assert world.announced == []
        world.beat()
    assert roster(world) == ("w0",)


def test_one_who_fails_to_start_is_not_waited_for(make: Make) -> None:
    world = make(restarts=0)
    world.start_run(2)
    worker = world.connect("w0", launched=True)
    assert worker is not None
    world.ready(worker)
    world.exited("w1", -9)
    world.beat()
    assert roster(world) == ("w0",)


# Too few.


def test_below_the_minimum_all_wait_until_others_come(make: Make) -> None:
    world = make(sets=("workers.min=2",))
    a, b = world.join(), world.join()
    world.settle(8)
    world.die(b)
    assert heard(a, Paused)
    assert status(world)["state"] == "paused"
    c = world.join()
    told = heard(a, Generation)[-1]
    assert told.roster == (a.id, c.id)
    assert not told.planned  # nobody takes a step in which it could be passed on
    world.settle(8)
    assert status(world)["state"] == "training"


def test_a_leave_below_the_minimum_is_a_leave_all_the_same(make: Make) -> None:
    world = make(sets=("workers.min=2",))
    a, b = world.join(), world.join()
    world.settle(8)
    world.leave(b)
    assert heard(b, Goodbye)
    assert heard(a, Paused)


def test_a_run_below_the_minimum_is_scaled_to_it(make: Make) -> None:
    world = make(sets=("workers.min=3",))
    world.start_run(2)
    world.settle(4)
    assert status(world)["state"] == "paused"
    assert ask(world, "scale", num_workers=3).told == {"num_workers": 3}
    world.settle(8)
    assert (status(world)["state"], roster(world)) == ("training", ("w0", "w1", "w2"))


# Too many.


@pytest.mark.parametrize(
    ("num", "sets", "batch", "told"),
    [
        (3, (), {"batch": 2}, "a batch of 2 cannot give 3 workers their minimum, 3 in total"),
        (1, ("workers.min=3",), {"batch": 2}, "a batch of 2 cannot give 3 workers"),
        (3, ("batch.min_share=2",), {"batch": 5}, "cannot give 3 workers their minimum, 6"),
        (3, (), GROWS, "a batch of 2 cannot give 3 workers their minimum, 3 in total"),
    ],
)
def test_workers_that_the_batch_has_no_samples_for_end_the_run_with_the_numbers(
    make: Make, num: int, sets: tuple[str, ...], batch: dict[str, Any], told: str
) -> None:
    world = make(sets=sets)
    world.start_run(num)
    worker = world.connect("w0", launched=True)
    assert worker is not None
    world.ready(worker, **batch)
    assert not ending(world).ok
    assert told in ending(world).why
    assert [told.why for told in heard(worker, Goodbye)] == [ending(world).why]
    assert not (world.folder / "journal.jsonl").exists()  # the folder can be resumed with another


def test_workers_whose_caps_are_below_min_share_need_no_more_than_their_caps(make: Make) -> None:
    world = make(sets=("batch.min_share=4",))
    world.start_run(4)
    for name in ("w0", "w1", "w2", "w3"):
        worker = world.connect(name, launched=True)
        assert worker is not None
        world.ready(worker, batch=8, cap=2)
    assert world.announced[-1].shares == (2, 2, 2, 2)


def test_a_joiner_that_came_before_the_batch_was_known_is_refused_if_it_is_too_many(
    make: Make,
) -> None:
    world = make()
    world.start_run(2)
    joiner = world.connect()
    a, b = (world.connect(name, launched=True) for name in ("w0", "w1"))
    assert a is not None
    assert b is not None
    assert joiner is not None
    for worker in (a, joiner, b):
        world.ready(worker, batch=2)
    assert [told.why for told in heard(joiner, Refused)] == [
        "the run is full: it has room for 2 workers"
    ]
    assert roster(world) == ("w0", "w1")


def test_a_resumed_run_starts_no_more_workers_than_its_batch_has_samples_for(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world = make()
    world.join(batch=2)
    world.kill_run("left for the night")
    world.restart()
    world.start_run(3, True)
    assert len(world.starting) == 2
    assert "the run has room for 2 workers, not for 3" in caplog.text
    for name in list(world.starting):
        worker = world.connect(name, launched=True)
        assert worker is not None
        world.ready(worker, batch=2)
    assert world.ending is None
    assert len(world.announced[-1].roster) == 2


# Leaving.


def test_a_leaver_that_dies_before_it_may_go_makes_the_change_hold_at_once(make: Make) -> None:
    world = make()
    a, b, c = training(world, 3)
    world.leave(b)
    planned = world.announced[-1]
    assert planned.planned
    world.cut(b)  # perhaps it only went a moment early
    assert world.announced[-1] == planned
    world.say(a, Stuck(generation=a.generation, step=1, waited_s=0.0))
    forced = world.announced[-1]
    assert (forced.number, forced.roster, forced.planned) == (planned.number, (a.id, c.id), False)
    assert heard(c, Generation)[-1] == forced


def test_a_leaver_that_is_gone_is_not_waited_for_without_end(make: Make) -> None:
    world = make()
    _, b, _ = training(world, 3)
    world.leave(b)
    world.cut(b)
    for _ in range(12):
        world.beat()
    assert not world.announced[-1].planned


def test_when_all_want_to_leave_the_run_stops_in_order(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    world.leave(a)
    world.leave(b)
    world.settle(20)
    assert ending(world).ok
    assert "a spot notice" in ending(world).why


# The end.


def test_others_go_on_without_one_that_finished_before_them(make: Make) -> None:
    world = make()
    a, b, c = training(world, 3)
    world.finish(b)
    assert world.ending is None
    world.say(a, Stuck(generation=a.generation, step=1, waited_s=0.0))
    assert (roster(world), world.announced[-1].planned) == ((a.id, c.id), False)
    assert heard(b, Goodbye)
    world.settle(8)
    world.finish(a)
    world.finish(c)
    assert ending(world) == Ending(ok=True, why="trained to the end")


def test_one_that_finishes_while_it_is_to_leave_is_not_waited_for(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    world.leave(a)
    planned = world.announced[-1]
    world.finish(a)
    complain(world, b)
    told = heard(b, Generation)[-1]
    assert (told.number, told.roster, told.planned) == (planned.number, (b.id,), False)


def test_a_newcomer_that_was_not_passed_on_does_not_hold_the_end_up(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    c = world.join()
    assert c.id in roster(world)
    world.finish(a)
    world.finish(b)
    assert ending(world).ok
    assert heard(c, Goodbye)


def test_a_stop_waits_for_the_change_under_way(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    c = world.join()
    world.stop_run("enough")
    assert c.id in roster(world)
    world.settle(20)
    assert [g.planned for g in world.announced if not g.roster] == [True]
    assert ending(world) == Ending(ok=True, why="stopped: enough")
    assert not any(w.connected for w in (a, b, c))
    assert isinstance(events(world)[-1], Left)


def test_a_worker_that_dies_while_all_leave_does_not_keep_the_others(make: Make) -> None:
    world = make()
    _, b, _ = launched(world, 3)
    world.stop_run("enough")
    parting = world.announced[-1]
    world.exited(b.id, -9)
    assert world.announced[-1].number > parting.number
    assert world.announced[-1].roster == ()
    assert not world.announced[-1].planned
    b.connected = False
    world.settle(20)
    assert ending(world).ok


def test_a_run_without_a_worker_stops_at_once(make: Make) -> None:
    world = make()
    world.start_run(2)
    world.stop_run("enough")
    assert ending(world).ok
    refused = world.hello(worker="w0")
    assert refused == Refused(why="the run is ending")


# Processes.


def test_one_that_is_dying_is_not_waited_for_until_it_is_gone(make: Make) -> None:
    world = make(restarts=1)
    a, b, c = launched(world, 3)
    world.dying(b.id, 9)
    assert roster(world) == (a.id, c.id)
    assert world.announced[-1].reason == f"{b.id} lost: it was ended by SIGKILL"
    b.connected = False
    world.disconnected(b.id)
    world.settle(5)
    assert world.starting == []  # its place is not free before it has ended
    world.exited(b.id, -9)
    assert len(world.starting) == 1
    world.settle(20)
    assert len(roster(world)) == 3
    assert [e.workers for e in events(world) if isinstance(e, Lost)] == [(b.id,)]


def test_what_a_process_says_last_is_heard_before_its_end_is_judged(make: Make) -> None:
    world = make()
    _, b, _ = launched(world, 3)
    world.exited(b.id, 1, "a log")
    assert world.ending is None
    world.say(b, Failed(told="the traceback"))
    assert ending(world).told == "the traceback"


def test_an_exit_code_without_last_words_is_the_scripts_failure(make: Make) -> None:
    world = make()
    _, b, _ = launched(world, 3)
    world.exited(b.id, 3, "a log")
    world.cut(b)
    assert ending(world) == Ending(
        ok=False, why="w1 ended with exit code 3", told="a log", worker="w1"
    )


def test_an_end_is_judged_even_if_the_connection_stays(make: Make) -> None:
    world = make()
    _, b, _ = launched(world, 3)
    world.exited(b.id, 3)
    for _ in range(4):
        world.beat()
    assert not ending(world).ok


def test_a_newcomer_that_fails_to_start_does_not_end_a_run(make: Make) -> None:
    world = make()
    launched(world, 2)
    assert ask(world, "scale", num_workers=3).told == {"num_workers": 3}
    (name,) = world.starting
    world.starting.clear()
    world.exited(name, 1, "no such file")
    assert world.ending is None
    assert [e.num_workers for e in events(world) if isinstance(e, LaunchFailed)] == [1]
    assert ask(world, "scale", num_workers=3).problem == ""
    assert len(world.starting) == 1


def test_a_newcomer_that_is_sent_home_is_not_waited_for(make: Make) -> None:
    world = make()
    launched(world, 2)
    ask(world, "scale", num_workers=3)
    worker = world.connect(world.starting.pop(), launched=True)
    assert worker is not None
    assert ask(world, "drain", worker=worker.id).problem == ""
    assert heard(worker, Goodbye)
    world.end(worker, 75)
    assert [e.num_workers for e in events(world) if isinstance(e, LaunchFailed)] == [1]


def test_one_who_was_let_go_and_stays_does_not_keep_a_run_alive(make: Make) -> None:
    world = make(restarts=0)
    a, b = launched(world, 2)
    ask(world, "drain", worker=b.id)
    world.say(a, Began(generation=world.announced[-1].number, step=1))
    assert heard(b, Goodbye)  # and it stays, and says no more
    world.die(a)
    assert not ending(world).ok


def test_restarts_are_counted_over_the_whole_run(make: Make) -> None:
    world = make(restarts=2)
    workers = launched(world, 3)
    for _ in range(3):
        world.die(world.workers[roster(world)[-1]])
        world.settle(6)
    assert len(workers) == 3
    assert len(roster(world)) == 2
    assert status(world)["restarts_left"] == 0


def test_one_who_was_leaving_is_not_replaced(make: Make) -> None:
    world = make()
    _, b, _ = launched(world, 3)
    world.join()  # a change is under way, so that the leave has to wait
    ask(world, "drain", worker=b.id)
    world.die(b)
    assert world.starting == []


def test_one_who_leaves_on_a_notice_is_replaced_and_no_restart_is_counted(make: Make) -> None:
    world = make(restarts=1)
    a, b = launched(world, 2)
    for leaver in (b, a):
        world.leave(leaver)
        world.settle(8)
    assert roster(world) == ("w2", "w3")
    assert status(world)["restarts_left"] == 1
    world.leave(world.workers["w2"])
    world.leave(world.workers["w3"])  # all leave at once: their state is handed over first
    world.settle(20)
    assert roster(world) == ("w4", "w5")


def test_a_worker_that_is_ended_here_leaves_on_no_notice(make: Make) -> None:
    """SIGTERM is how its process is ended, and it takes that for a notice."""
    world = make(start_s=1.0, restarts=1)
    launched(world, 2)
    ask(world, "scale", num_workers=3)
    late = world.connect(world.starting.pop(), launched=True)
    assert late is not None
    for _ in range(4):
        world.beat()
    assert world.stopped == [late.id]
    world.leave(late)
    assert world.starting == []


# Scripts that fail or end on one worker.


@pytest.mark.parametrize("when", ["starting", "joining", "joined"])
@pytest.mark.parametrize("told", ["", "Traceback ...\nFileNotFoundError: no data"])
def test_a_newcomer_whose_script_fails_before_its_first_step_is_left_out(
    make: Make, caplog: pytest.LogCaptureFixture, when: str, told: str
) -> None:
    world = make()
    a, b = launched(world, 2)
    ask(world, "scale", num_workers=3)
    c = world.connect(world.starting.pop(), launched=True)
    assert c is not None
    if when != "starting":
        world.ready(c)
    world.enter()
    while when == "joined" and not c.begun:
        world.take_step()
        world.enter()
    if told:
        world.say(c, Failed(told=told))
    world.end(c, 1)
    world.settle(8)
    assert roster(world) == (a.id, b.id)
    assert status(world)["state"] == "training"
    assert world.starting == []  # it would fail again
    error = "no data" if told else "ended with exit code 1"
    assert error in status(world)["left_out"][c.id]
    assert sum(told in m for m in caplog.messages if c.id in m) >= 1


def test_a_newcomer_whose_script_fails_as_it_is_to_leave_again_does_not_hold_the_others_up(
    make: Make,
) -> None:
    """They are in a step with it, so no leader passes on the generation without it."""
    world = make()
    a, b = training(world, 2)
    c = world.join()
    while not c.begun:
        world.take_step()
        world.enter()
    ask(world, "drain", worker=c.id)
    assert heard(a, Generation)[-1].planned
    world.say(c, Failed(told="no data"))
    world.end(c, 1)
    assert not heard(a, Generation)[-1].planned
    world.settle(8)
    assert a.generation == b.generation == world.status()["generation"]
    assert world.take_step()


def test_a_script_that_fails_in_the_first_step_of_all_ends_the_run(make: Make) -> None:
    world = make()
    world.join()
    b = world.join()
    world.enter()
    assert world.began
    world.say(b, Failed(told="it is wrong"))
    assert ending(world).told == "it is wrong"


def test_a_script_that_exits_with_0_on_one_worker_is_told_and_replaced(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world = make(restarts=1)
    _, b, _ = launched(world, 3)
    world.end(b, 0)
    world.settle(8)
    assert roster(world) == ("w0", "w2", "w3")
    assert "w1 ended with exit code 0 while the others train on" in caplog.text
    assert "exit code 0" in status(world)["left_out"]["w1"]
    assert status(world)["restarts_left"] == 0


def test_a_script_that_leaves_its_loop_early_on_one_worker_is_told_and_replaced(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world = make(restarts=1)
    a, b, _ = launched(world, 3)
    step = world.step
    world.finish(b)
    complain(world, a)
    assert status(world)["left_out"] == {}  # the others may be at the end as well
    world.settle(8)
    assert roster(world) == ("w0", "w2", "w3")
    why = f"its script ended at step {step} while the others train on"
    assert status(world)["left_out"] == {"w1": why}
    assert f"w1: {why}" in caplog.text


def test_the_log_says_why_workers_are_launched_and_drained(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "evenstep")
    world = make()
    _, b, c = launched(world, 3)
    world.die(c)
    world.settle(8)
    ask(world, "scale", num_workers=4)
    world.settle(8)
    ask(world, "drain", worker="w3")
    world.leave(b)
    world.settle(8)
    ask(world, "scale", num_workers=1)
    orders = [m for m in caplog.messages if m.startswith(("launching", "draining"))]
    assert orders == [
        "launching 3 workers: asked for",
        "launching 1 worker: in place of w2",
        "launching 1 worker: size 4 requested",
        "draining w3: requested by an operator",
        "draining w1: a spot notice",
        "launching 1 worker: in place of w1",
        "draining w5: size 1 requested",
        "draining w4: size 1 requested",
    ]


def test_a_launcher_that_cannot_launch_is_an_event(make: Make) -> None:
    world = make()
    training(world, 1)

    def broken(kind: str, workers: Sequence[str]) -> None:
        raise OSError("no more processes")

    world.start = broken  # type: ignore[method-assign]
    assert ask(world, "scale", num_workers=3).problem == ""
    (failed,) = [e for e in events(world) if isinstance(e, LaunchFailed)]
    assert (failed.num_workers, failed.cause) == (2, "no more processes")


def test_workers_on_their_way_are_not_ordered_again(make: Make) -> None:
    world = make()
    world.start_run(3)
    worker = world.connect("w0", launched=True)
    assert worker is not None
    world.starting.remove("w0")
    world.ready(worker)
    for _ in range(11):
        world.beat()
    assert ask(world, "scale", num_workers=4).problem == ""
    assert world.starting == ["w1", "w2", "w3"]
    world.settle(8)
    assert len(roster(world)) == 4


def test_more_workers_than_the_batch_can_be_shared_among_are_not_let_in(make: Make) -> None:
    world = make()
    for _ in range(2):
        world.join(batch=2)
        world.settle(8)
    refused = world.hello()
    assert isinstance(refused, Refused)
    assert "has room for 2 workers" in refused.why


def test_more_workers_than_allowed_are_not_let_in(make: Make) -> None:
    world = make(max_workers=2, min_workers=1)
    training(world, 2)
    refused = world.hello()
    assert isinstance(refused, Refused)
    assert "has room for 2 workers" in refused.why
    assert "1 to 2 workers" in ask(world, "scale", num_workers=3).problem


def test_what_a_script_does_after_training_may_fail_the_run(make: Make) -> None:
    world = make()
    a, b = launched(world, 2)
    world.finish(a)
    world.finish(b)
    world.exited(a.id, 0)
    assert ending(world).ok
    world.exited(b.id, -9, "saving the model")
    assert ending(world) == Ending(
        ok=False, why="w1 was ended by SIGKILL", told="saving the model", worker="w1"
    )


def test_one_that_was_lost_and_is_gone_only_after_the_run_fails_no_run(make: Make) -> None:
    world = make()
    a, b, c = launched(world, 3)
    world.dying(c.id, 9)
    world.enter()
    world.finish(a)
    world.finish(b)
    assert ending(world).ok
    world.exited(c.id, -9)
    assert ending(world).ok


def test_an_abort_as_the_interpreter_ends_is_told_and_fails_no_run(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world = make()
    a, b = launched(world, 2)
    world.finish(a)
    world.finish(b)
    world.exited(b.id, -6)
    assert ending(world).ok
    assert "w1 was ended by SIGABRT, after the run" in caplog.text


def test_one_whom_we_end_ourselves_fails_no_run(make: Make) -> None:
    world = make()
    a, b = launched(world, 2)
    b.frozen = True
    world.say(a, Stuck(generation=a.generation, step=1, waited_s=0.0))
    while b.connected:
        world.beat()
    world.enter()
    world.finish(a)
    assert world.stopped == [b.id]
    world.exited(b.id, -15)
    assert ending(world).ok


def test_published_values_of_earlier_generations_are_forgotten(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    publish(world, a, "a")
    world.die(b)
    world.settle(8)
    publish(world, a, "b")
    assert world.state.published.keys() == {(a.id, "b")}


def test_a_worker_is_not_blamed_for_what_another_one_publishes(make: Make) -> None:
    world = make()
    a, b, c = training(world, 3)
    for i in range(MAX_PUBLISHED):
        publish(world, b, f"b {i}")
    for i in range(MAX_PUBLISHED):
        publish(world, a, f"a {i}")
        publish(world, c, f"c {i}")
    assert roster(world) == (a.id, b.id, c.id)
    publish(world, b, "one more")
    assert "publishes more" in heard(b, Goodbye)[0].why
    assert roster(world) == (a.id, c.id)


def publish(world: World, worker: SimWorker, key: str) -> None:
    number = world.announced[-1].number
    message = Publish(generation=number, key=key, value=b"")
    world.handle(Heard(worker=worker.id, message=message))


# Names.


def test_a_name_is_given_once(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    assert (a.id, b.id) == ("w0", "w1")
    world.die(b)
    for name in (a.id, b.id):
        assert isinstance(world.hello(worker=name), Refused)
    c = world.connect()
    assert c is not None
    assert c.id == "w2"
    other = world.handle(Connected(worker=c.id, host="elsewhere", pid=1))
    assert isinstance(other, Welcome)
    assert other.worker == "w3"


def test_a_lost_worker_that_returns_is_sent_away(make: Make) -> None:
    world = make()
    _, b = training(world, 2)
    number = b.generation
    world.die(b)
    answer = world.hello(worker=b.id, generation=number)
    assert isinstance(answer, Refused)
    assert "it can join as a new worker" in answer.why


# Reports that are late, false or too much.


def test_only_the_leader_tells_of_steps_and_generations(make: Make) -> None:
    world = make()
    a, b = training(world, 2)
    step = status(world)["step"]
    reports = (StepReport(a.id, 32, 0.1), StepReport(b.id, 32, 0.1))
    for worker, number in ((b, a.generation), (a, a.generation - 1), (a, a.generation + 1)):
        message = Stepped(generation=number, step=step + 1, seconds=0.1, reports=reports)
        world.say(worker, message)
    assert status(world)["step"] == step


def test_a_policy_that_fails_stops_balancing_and_not_training(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    a, b = training(world, 2)

    def fails(*_: Any) -> None:
        raise ZeroDivisionError("a policy's own mistake")

    monkeypatch.setattr("evenstep.decide.batching.auto.Auto.next", fails)
    step = world.step
    for _ in range(5):
        assert world.take_step()
    assert status(world)["step"] == step + 4
    assert not heard(a, NewPlan)
    world.die(b)
    world.settle(4)
    assert roster(world) == (a.id,)


def test_a_full_disk_ends_neither_the_run_nor_its_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        world = World(disk.path)
        a, b, c = training(world, 3)
        disk.fill()
        while "journal.jsonl: cannot be written" not in caplog.text:  # its last page has room
            world.take_step()
        while "membership.jsonl: cannot be written" not in caplog.text:
            passer_by = world.connect()
            assert passer_by is not None
            world.cut(passer_by)
        before = len(events(world))
        world.die(b)
        world.settle(8)
        assert roster(world) == (a.id, c.id)
        assert status(world)["state"] == "training"
        assert len(events(world)) == before
        disk.free()
        world.flush()
        assert Lost(workers=(b.id,), cause="its connection closed") in events(world)[before:]
        assert replayed(disk.path)
        world.restart()
        for worker in (a, c):
            world.reconnect(worker)
        assert roster(world) == (a.id, c.id)
        world.close()
    for name in ("journal", "membership"):
        told = [r.getMessage() for r in caplog.records if f"{name}.jsonl: " in r.getMessage()]
        assert ["No space left" in text or "written again" in text for text in told] == [True] * 2


def test_done_of_one_who_never_trained_is_no_end(make: Make) -> None:
    world = make()
    training(world, 2)
    stranger = world.connect()
    assert stranger is not None
    world.say(stranger, Done(step=3))
    assert world.ending is None
    assert status(world)["state"] == "training"


def test_a_worker_that_does_not_come_up_in_time_is_given_up(make: Make) -> None:
    world = make(start_s=30.0, restarts=0)
    launched(world, 2)
    ask(world, "scale", num_workers=3)
    (late,) = world.starting
    world.starting.clear()  # it hangs
    for _ in range(70):
        world.beat()
    assert world.stopped == [late]
    world.exited(late, -9)
    assert any(isinstance(e, LaunchFailed) for e in events(world))
    assert status(world)["state"] == "training"


# How fast it is.


def report_step(
    world: World,
    leader: SimWorker,
    seconds: float,
    quiet: Steps | None = None,
    earlier: Steps | None = None,
) -> None:
    """The leader's word of a step, and of quiet ones before it, after the time that they took."""
    quiet, earlier = quiet or Steps(), earlier or Steps()
    shares = leader.told[leader.generation].shares
    reports = tuple(map(StepReport, roster(world), shares, [seconds] * len(shares)))
    world.now_s += quiet.seconds + seconds
    world.step += quiet.num + 1
    number, step = leader.generation, world.step
    world.say(
        leader,
        Stepped(
            generation=number,
            step=step,
            seconds=seconds,
            reports=reports,
            quiet=quiet,
            earlier=earlier,
        ),
    )


def test_status_shows_the_throughput_of_the_last_steps_with_quiet_ones(make: Make) -> None:
    world = make()
    leader, _ = training(world, 2)
    for _ in range(20):
        report_step(world, leader, seconds=0.064)
    world.now_s += 60.0  # an evaluation
    report_step(world, leader, 0.32, Steps(num=19, seconds=19 * 0.64, samples=19 * 64))
    assert status(world)["samples_per_s"] == round(20 * 64 / (19 * 0.64 + 0.32), 1)


def test_status_shows_no_throughput_of_other_workers(make: Make) -> None:
    world = make()
    leader, other = training(world, 2)
    report_step(world, leader, seconds=0.064)
    world.die(other)
    assert status(world)["samples_per_s"] == 0.0
    world.enter()
    before = Steps(num=100, seconds=6.4, samples=100 * 64)
    quiet = Steps(num=1, seconds=0.64, samples=64 + before.samples)
    report_step(world, leader, 0.64, quiet, before)
    assert status(world)["samples_per_s"] == 100.0
