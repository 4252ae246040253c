"""Plan, requested and observed: what is asked of an engine, and what is told of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evenstep.launch.requests import (
    News,
    Requests,
    RequestUnmet,
    WorkerEnded,
    WorkerFound,
    WorkerLeaves,
    WorkerRuns,
)
from evenstep.ports import Observed, Stage

PENDING, RUNNING = Observed(stage=Stage.PENDING), Observed(stage=Stage.RUNNING)
ENDED = Observed(stage=Stage.ENDED, exit_code=3)
NONE: dict[str, Observed] = {}
LIMIT_S = 100.0


def planned(*workers: str) -> Requests:
    return Requests(LIMIT_S).plan("cpu", workers, 0.0)


def asked(*workers: str) -> Requests:
    return planned(*workers).starting(workers).started(workers, 1.0)


def test_workers_are_asked_for_once_and_one_kind_at_a_time() -> None:
    requests = planned("w0", "w1").plan("gpu", ["w2"], 0.0)
    assert requests.to_start(0.0) == ("cpu", ("w0", "w1"))
    requests = requests.starting(["w0", "w1"])
    assert requests.to_start(0.0) == ("gpu", ("w2",))
    requests = requests.starting(["w2"]).started(["w0", "w1"], 1.0)
    assert requests.to_start(1.0) == ("", ())


def test_a_worker_that_begins_and_ends_is_news_once() -> None:
    told: list[News] = []
    requests = asked("w0")
    for at_s, shown in enumerate((PENDING, RUNNING, RUNNING, ENDED, ENDED), start=2):
        requests, news = requests.observe({"w0": shown}, at_s, at_s)
        told += news
    assert told == [WorkerRuns(worker="w0"), WorkerEnded(worker="w0", exit_code=3, why="")]
    assert not requests.open


def test_a_failed_attempt_is_repeated_only_after_a_look_that_does_not_show_the_worker() -> None:
    requests, news = planned("w0").starting(["w0"]).start_failed(["w0"], 1.0, "hung", final=False)
    assert not news
    assert requests.to_start(50.0) == ("", ()), "the engine may have accepted it"
    early, _ = requests.observe(NONE, 0.5, 2.0)
    assert early.to_start(50.0) == ("", ()), "a look that began before the attempt ended"
    requests, _ = requests.observe(NONE, 3.0, 3.0)
    assert requests.to_start(50.0) == ("cpu", ("w0",))


def test_a_worker_whose_request_seemed_to_fail_and_that_shows_up_is_not_asked_for_again() -> None:
    requests, _ = planned("w0").starting(["w0"]).start_failed(["w0"], 1.0, "hung", final=False)
    requests, news = requests.observe({"w0": RUNNING}, 2.0, 2.0)
    assert news == [WorkerRuns(worker="w0")]
    requests, _ = requests.observe(NONE, 3.0, 3.0)
    assert requests.to_start(99.0) == ("", ())


def test_attempts_back_off() -> None:
    requests, now_s, waits = planned("w0"), 0.0, []
    for _ in range(6):
        requests = requests.starting(["w0"])
        requests, _ = requests.start_failed(["w0"], now_s, "no answer", final=False)
        requests, _ = requests.observe(NONE, now_s + 0.1, now_s + 0.1)
        next_s = requests.next_s()
        assert next_s is not None
        waits.append(next_s - now_s)
        now_s = next_s
    assert waits == [1, 2, 4, 8, 16, LIMIT_S / 5]


def test_a_refusal_is_final() -> None:
    requests = planned("w0", "w1").starting(["w0", "w1"])
    requests, news = requests.start_failed(["w0", "w1"], 1.0, "no such partition", final=True)
    assert news == [RequestUnmet(workers=("w0", "w1"), cause="no such partition")]
    assert not requests.open


def test_a_request_that_is_pending_for_too_long_is_given_up_and_withdrawn() -> None:
    waits = Observed(stage=Stage.PENDING, why="Resources")
    requests, news = asked("w0").observe({"w0": waits}, 99.0, 99.0)
    assert (news, requests.to_stop(99.0)) == ([], ())
    requests, news = requests.observe({"w0": waits}, 101.0, 101.0)
    cause = "given up after 100 s: pending: Resources"
    assert news == [RequestUnmet(workers=("w0",), cause=cause)]
    assert requests.to_stop(101.0) == ("w0",)
    requests, news = requests.observe({"w0": ENDED}, 102.0, 102.0)
    assert (news, requests.open) == ([], {}), "it was given up: its end is no news"


def test_a_request_that_the_engine_never_answers_is_given_up_without_it() -> None:
    requests = planned("w0").starting(["w0"])
    requests, news = requests.tick(101.0)
    cause = "given up after 100 s: the engine has not answered"
    assert news == [RequestUnmet(workers=("w0",), cause=cause)]
    requests, news = requests.started(["w0"], 200.0).observe({"w0": PENDING}, 201.0, 201.0)
    assert (news, requests.to_stop(201.0)) == ([], ("w0",)), "it is withdrawn as soon as it can be"


def test_a_worker_that_may_run_by_now_is_not_given_up_while_the_engine_is_silent() -> None:
    """It may have joined long ago."""
    requests, news = asked("w0").tick(1000.0)
    assert news == []
    requests, news = requests.observe({"w0": RUNNING}, 1001.0, 1001.0)
    assert news == [WorkerRuns(worker="w0")]


def test_a_worker_that_was_given_up_and_runs_after_all_is_taken_back() -> None:
    requests, _ = planned("w0").tick(101.0)
    assert not requests.open
    requests, news = requests.observe({"w0": RUNNING}, 102.0, 102.0)
    assert news == [WorkerFound(worker="w0"), WorkerRuns(worker="w0")]
    assert requests.to_stop(103.0) == ()
    _, news = requests.observe({"w0": ENDED}, 104.0, 104.0)
    assert news == [WorkerEnded(worker="w0", exit_code=3, why="")]


def test_a_worker_that_the_engine_does_not_show_twice_is_gone() -> None:
    requests, _ = asked("w0").observe({"w0": RUNNING}, 2.0, 2.0)
    requests, news = requests.observe(NONE, 3.0, 3.0)
    assert news == []
    requests, news = requests.observe(NONE, 4.0, 4.0)
    why = "the engine does not show it any more"
    assert news == [WorkerEnded(worker="w0", exit_code=75, why=why)]


def test_a_look_that_began_before_the_request_was_accepted_does_not_miss_it() -> None:
    requests = planned("w0").starting(["w0"]).started(["w0"], 10.0)
    for _ in range(5):
        requests, news = requests.observe(NONE, 9.0, 11.0)
        assert news == []


def test_workers_of_an_earlier_coordinator_are_found() -> None:
    requests, news = Requests(LIMIT_S).observe({"w1": RUNNING, "w2": PENDING, "w0": ENDED}, 0, 0)
    assert news == [WorkerFound(worker="w1"), WorkerRuns(worker="w1"), WorkerFound(worker="w2")]
    _, news = requests.observe({"w1": RUNNING, "w2": PENDING}, 101.0, 101.0)
    assert [type(item) for item in news] == [RequestUnmet], "w2 has pended for the limit"


def test_stopped_workers_are_asked_again_until_they_have_ended() -> None:
    requests, _ = asked("w0").observe({"w0": RUNNING}, 2.0, 2.0)
    requests, news = requests.stop(["w0", "w9"])
    assert (news, requests.to_stop(2.0)) == ([], ("w0",))
    requests = requests.stopping(["w0"], 2.0)
    assert requests.to_stop(3.0) == ()
    assert requests.to_stop(60.0) == ("w0",)


def test_a_worker_that_is_stopped_before_it_was_asked_for_is_never_asked_for() -> None:
    requests, news = planned("w0").stop(["w0"])
    assert news == [RequestUnmet(workers=("w0",), cause="no longer needed")]
    assert requests.to_start(1.0) == ("", ())


def test_a_host_that_is_about_to_go_is_news_once() -> None:
    goes = Observed(stage=Stage.RUNNING, leaves="preempted in 30 s")
    requests, _ = asked("w0").observe({"w0": RUNNING}, 2.0, 2.0)
    requests, news = requests.observe({"w0": goes}, 3.0, 3.0)
    assert news == [WorkerLeaves(worker="w0", why="preempted in 30 s")]
    _, news = requests.observe({"w0": goes}, 4.0, 4.0)
    assert news == []


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(["ok", "hang", "fail", "refuse", "lost"])),
        st.tuples(st.just("look"), st.sampled_from(["all", "late", "nothing"])),
        st.tuples(st.just("run"), st.sampled_from(["w0", "w1", "w2"])),
        st.tuples(st.just("end"), st.sampled_from(["w0", "w1", "w2"])),
        st.tuples(st.just("wait"), st.sampled_from(["1", "30", "200"])),
        st.tuples(st.just("stop"), st.sampled_from(["w0", "w1", "w2"])),
    ),
    max_size=40,
)


@given(STEPS)
def test_whatever_the_engine_does_each_worker_runs_once_and_is_told_of_consistently(
    steps: list[tuple[str, str]],
) -> None:
    workers = ("w0", "w1", "w2")
    requests, now_s = planned(*workers), 0.0
    engine: dict[str, Observed] = {}
    num_starts = dict.fromkeys(workers, 0)
    told: dict[str, list[str]] = {w: [] for w in workers}

    def tell(news: list[News]) -> None:
        for item in news:
            names = item.workers if isinstance(item, RequestUnmet) else (item.worker,)
            for worker in names:
                told[worker].append(type(item).__name__)

    for what, how in steps:
        now_s += 0.5
        match what:
            case "ask":
                _, due = requests.to_start(now_s)
                requests = requests.starting(due)
                if how in ("ok", "lost"):
                    engine.update(dict.fromkeys(due, PENDING))
                    for worker in due:
                        num_starts[worker] += 1
                now_s += 0.5
                if how == "ok":
                    requests = requests.started(due, now_s)
                elif due:
                    requests, news = requests.start_failed(due, now_s, how, final=how == "refuse")
                    tell(news)
            case "look" if how != "nothing":
                requests, news = requests.observe(engine, now_s, now_s + 0.25)
                tell(news)
            case "run" if engine.get(how) == PENDING:
                engine[how] = RUNNING
            case "end" if how in engine:
                engine[how] = ENDED
            case "wait":
                now_s += float(how)
            case "stop":
                requests, news = requests.stop([how])
                tell(news)
        requests, news = requests.tick(now_s)
        tell(news)
    assert max(num_starts.values()) <= 1, "a worker was asked for twice"
    for worker in workers:
        ends = [name for name in told[worker] if name in ("RequestUnmet", "WorkerEnded")]
        back = told[worker].count("WorkerFound")
        assert len(ends) <= 1 + back, f"{worker}: {told[worker]}"
        if worker not in requests.open:
            assert len(ends) == 1 + back, f"{worker} vanished without news: {told[worker]}"
