"""Lost workers in loops that accumulate, have several optimizers, sum or break early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench.testbed.live_run import HELD, Fault, same, until

from tests.faults.cluster import Cluster
from tests.faults.conftest import Alone

LOOPS = Path(__file__).with_name("loops.py")

LONG = pytest.mark.long

CASES: list[tuple[str, tuple[Fault, ...]]] = [  # in sequence; six workers at the start
    ("accumulate", (("rank3", "backward", 7), ("leader", "bucket", 14), ("rank3", "reduced", 22))),
    ("accumulate", (("rank3", "bucket", 7), ("rank2", "stepped", 15), ("leader", "reduced", 22))),
    ("numbered", (("rank3", "backward", 7), ("leader", "bucket", 14), ("rank3", "reduced", 29))),
    ("numbered", (("rank3", "bucket", 9), ("rank2", "stepped", 19), ("leader", "reduced", 22))),
    ("in_windows", (("rank3", "bucket", 7), ("leader", "bucket", 14), ("rank3", "reduced", 29))),
    ("in_windows", (("rank3", "backward", 9), ("rank2", "stepped", 19), ("leader", "bucket", 22))),
    ("attempts", (("rank3", "bucket", 7), ("leader", "bucket", 14), ("rank3", "bucket", 29))),
    ("attempts", (("leader", "reduced", 9), ("rank2", "stepped", 19), ("rank3", "reduced", 22))),
    (
        "summed_attempts",
        (("rank3", "reduced", 7), ("leader", "reduced", 14), ("rank3", "bucket", 25)),
    ),
    (
        "summed_attempts",
        (("leader", "summed", 7), ("rank2", "bucket", 14), ("rank3", "reduced", 25)),
    ),
    (
        "summed_windows",
        (("rank3", "reduced", 7), ("leader", "reduced", 14), ("rank3", "bucket", 25)),
    ),
    (
        "summed_windows",
        (("leader", "summed", 7), ("rank2", "bucket", 15), ("rank3", "reduced", 25)),
    ),
    ("contrastive", (("rank3", "gathered", 7), ("leader", "bucket", 14), ("rank3", "forward", 29))),
    (
        "contrastive",
        (("rank3", "backward", 0), ("rank2", "forward", 9), ("leader", "gathered", 22)),
    ),
    ("columns", (("rank3", "bucket", 7), ("leader", "reduced", 14), ("rank3", "stepped", 25))),
    ("columns", (("rank3", "reduced", 9), ("rank2", "forward", 10), ("leader", "bucket", 22))),
    ("rollouts", (("rank3", "bucket", 7), ("leader", "reduced", 14), ("rank3", "forward", 25))),
    ("rollouts", (("rank3", "reduced", 9), ("rank2", "forward", 10), ("leader", "bucket", 22))),
    ("rates", (("rank3", "backward", 7), ("leader", "bucket", 10), ("rank3", "reduced", 22))),
    ("rates", (("rank3", "bucket", 9), ("rank2", "stepped", 14), ("leader", "backward", 22))),
    ("alternate", (("leader", "backward", 0), ("rank3", "forward", 14), ("rank3", "stepped", 22))),
    ("alternate", (("rank3", "backward", 7), ("rank2", "bucket", 14), ("leader", "reduced", 22))),
    ("sums", (("rank3", "forward", 7), ("leader", "summed", 14), ("rank3", "bucket", 22))),
    ("sums", (("rank3", "summed", 7), ("rank2", "reduced", 14), ("leader", "forward", 22))),
    ("break_early", (("rank3", "left", 8), ("leader", "bucket", 15), ("rank3", "backward", 20))),
    ("break_early", (("leader", "left", 8), ("rank3", "reduced", 15), ("leader", "stepped", 20))),
    ("in_steps", (("rank3", "bucket", 7), ("leader", "bucket", 14), ("rank3", "reduced", 24))),
    ("replaced", (("rank3", "backward", 7), ("leader", "bucket", 14), ("rank3", "bucket", 29))),
    ("weighted", (("rank3", "bucket", 9), ("leader", "bucket", 19), ("rank3", "reduced", 25))),
    (
        "stream_steps",
        (("rank3", "bucket", 3), ("leader", "bucket", 9), ("rank3", "stepped", 15)),
    ),
    ("streamed", (("rank3", "bucket", 9), ("leader", "bucket", 10), ("rank3", "reduced", 25))),
]


# Others take the same ways through the session.
ONLY_LONG = {
    "alternate",
    "attempts",
    "break_early",
    "columns",
    "in_steps",
    "numbered",
    "rates",
    "replaced",
    "rollouts",
    "weighted",
}


def case(i: int) -> Any:
    """Of each loop's two cases, the first runs in `make test`, the second in `make test-long`."""
    loop, faults = CASES[i]
    marks = [pytest.mark.long] * (i % 2 or loop in ONLY_LONG)
    return pytest.param(loop, faults, marks=marks, id="-".join([loop, *(f[1] for f in faults)]))


@pytest.mark.parametrize(("loop", "faults"), [case(i) for i in range(len(CASES))])
def test_survivors_end_where_one_process_ends(
    loop: str, faults: tuple[Fault, ...], tmp_path: Path, alone: Alone
) -> None:
    args = ["--loop", loop]
    with Cluster(tmp_path, workers=6, args=args, faults=faults, script=LOOPS) as run:
        assert run.finish() == 0
        assert len(list(run.out.glob("fault-*"))) == 3
        assert len(run.results()) == 3
        expected = alone(*args, script=LOOPS)
        assert all(same(result, expected) for result in run.results().values())


@pytest.mark.parametrize(
    "loop",
    [
        "in_windows",
        pytest.param("attempts", marks=LONG),
        "summed_attempts",
        pytest.param("numbered", marks=LONG),
        pytest.param("sums", marks=LONG),
        pytest.param("summed_windows", marks=LONG),
    ],
)
def test_workers_that_miss_a_result_take_over_the_state_of_the_one_that_has_it(
    loop: str, tmp_path: Path, alone: Alone
) -> None:
    """Wherever in its loop that one is: in the next batch, or in a sum before or after an update.

    The third and the last batch of a window, and the last one of an epoch.
    """
    steps = (6, 7, 19, 25)
    faults = tuple(("rank1", "reduced", step) for step in steps)
    args = ["--loop", loop, "--lose", *map(str, steps)]
    with Cluster(tmp_path, workers=7, args=args, faults=faults, script=LOOPS) as run:
        assert run.finish() == 0
        assert len(run.results()) == 3
        expected = alone("--loop", loop, script=LOOPS)
        assert all(same(result, expected) for result in run.results().values())
        assert run.output().count("pretended") == 6 + 5 + 4 + 3
        if loop in ("in_windows", "attempts", "summed_attempts", "summed_windows"):
            assert "others are further on in the script" in run.output()


@pytest.mark.long
def test_a_result_of_an_epochs_last_batch_is_missed_where_the_loop_never_asks_for_the_end(
    tmp_path: Path, alone: Alone
) -> None:
    """The worker that has it left its loop; the others still have that batch in hand."""
    steps = (9, 29)
    faults = tuple(("rank1", "reduced", step) for step in steps)
    args = ["--loop", "attempts", "--lose", *map(str, steps)]
    with Cluster(tmp_path, workers=4, args=args, faults=faults, script=LOOPS) as run:
        assert run.finish() == 0
        assert len(run.results()) == 2
        expected = alone("--loop", "attempts", script=LOOPS)
        assert all(same(result, expected) for result in run.results().values())


@pytest.mark.parametrize("step", [pytest.param(1, marks=LONG), 6, pytest.param(18, marks=LONG)])
def test_a_loop_that_miscounts_repeated_batches_is_refused(step: int, tmp_path: Path) -> None:
    """In its first window, in a later one, and in the short one at the end of an epoch."""
    faults = (("rank2", "backward", step),)
    args = ["--loop", "miscounted"]
    with Cluster(tmp_path, workers=3, args=args, faults=faults, script=LOOPS) as run:
        assert run.finish() != 0
        assert "Count with `for i, batch in session.enumerate(loader)`" in run.output()


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        ("two_attempts", "a worker was lost in step 6 when session.attempt, or the window"),
        ("two_passes", "backward() was called again in step 6, whose gradients generation 1"),
    ],
)
def test_what_cannot_be_repeated_as_a_whole_is_an_error(
    loop: str, says: str, tmp_path: Path
) -> None:
    args = ["--loop", loop]
    faults = (("rank2", "between", 6),)
    with Cluster(tmp_path, workers=3, args=args, faults=faults, script=LOOPS) as run:
        assert run.finish() != 0
        assert says in run.output()


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        ("own_schedule", "this loop steps a scheduler every 3 batches"),
        ("own_average", "this loop updates 'average' every 3 batches"),
    ],
)
def test_an_own_count_for_a_schedule_or_an_average_is_refused_before_it_goes_wrong(
    loop: str, says: str, tmp_path: Path
) -> None:
    with Cluster(tmp_path, workers=2, args=["--loop", loop], script=LOOPS) as run:
        assert run.finish() != 0
        assert says in run.output()


@pytest.mark.parametrize(
    ("loop", "did"),
    [
        ("own_schedule_and_steps", "a scheduler stepped"),
        ("own_average_and_steps", "'average' was updated"),
    ],
)
@pytest.mark.parametrize(
    ("step", "num_batches"),
    [pytest.param(1, 2, marks=LONG), pytest.param(5, 5, marks=LONG), (13, 2), (23, 5)],
)
def test_an_own_count_for_a_schedule_or_an_average_is_refused_once_it_is_wrong(
    loop: str, did: str, step: int, num_batches: int, tmp_path: Path
) -> None:
    """A batch is repeated in the middle of a window, or at its end, where the update is undone."""
    faults = (("rank2", "backward", step),)
    with Cluster(tmp_path, workers=3, args=["--loop", loop], faults=faults, script=LOOPS) as run:
        assert run.finish() != 0
        assert f"{did} after {num_batches} batches instead of 3" in run.output()


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        ("own_schedule_and_steps", "scheduler.step() was called a different number of times"),
        ("own_average_and_steps", "'average', registered with the session, was updated in step"),
    ],
)
def test_an_own_count_that_begins_anew_on_a_joiner_is_refused(
    loop: str, says: str, tmp_path: Path
) -> None:
    args = ["--loop", loop, *HELD]
    with Cluster(tmp_path, workers=2, args=args, script=LOOPS) as run:
        run.until_step(3)
        run.ask("scale", num_workers=3)
        assert run.wait() != 0
        assert says in run.output()


def test_a_learning_rate_by_a_counter_that_counts_a_repeated_batch_is_refused(
    tmp_path: Path,
) -> None:
    faults = (("rank2", "backward", 6),)
    args = ["--loop", "own_rates"]
    with Cluster(tmp_path, workers=3, args=args, faults=faults, script=LOOPS) as run:
        assert run.finish() != 0
        assert "lr was 0.0142857 and is 0.0125" in run.output()


def test_a_learning_rate_by_a_counter_that_begins_anew_on_a_joiner_is_refused(
    tmp_path: Path,
) -> None:
    args = ["--loop", "own_rates", *HELD]
    with Cluster(tmp_path, workers=2, args=args, script=LOOPS) as run:
        run.until_step(3)
        run.ask("scale", num_workers=3)
        assert run.wait() != 0
        assert "has another learning rate" in run.output()


def test_a_joiner_whose_first_gradients_are_no_numbers_is_left_out(
    tmp_path: Path, alone: Alone
) -> None:
    """The step is void, so the others end with the parameters of one process."""
    args = ["--loop", "broken_joiner", *HELD]
    with Cluster(tmp_path, workers=2, args=args, script=LOOPS) as run:
        run.until_step(3)
        run.ask("scale", num_workers=3)
        status = run.until(lambda s: "w2" in s["left_out"])
        assert "gradients of this worker are not finite in step" in status["left_out"]["w2"]
        assert not any("gradients" in problem for problem in status["problems"])
        run.until_training(2)
        assert run.finish() == 0
        expected = alone("--loop", "broken_worker", *args[2:], *run.epochs, script=LOOPS)
        assert set(run.results()) == {"w0", "w1"}
        assert all(same(result, expected) for result in run.results().values())


def test_a_worker_whose_gradients_become_no_numbers_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All had them from the first step on: the run goes on, as one process would."""
    args = ["--loop", "broken_worker", *HELD]
    with Cluster(tmp_path, workers=2, args=args, script=LOOPS) as run:
        status = run.until_step(5)
        told = "the gradients of all workers are not finite (w1's first, step 0)"
        assert status["problems"] == [told]
        assert run.finish() == 0
    assert caplog.text.count("w1's gradients are not finite (step 0)") == 1
    assert caplog.text.count(told) == 1


@pytest.mark.long
def test_the_backward_pass_of_a_void_step_is_aborted(tmp_path: Path, alone: Alone) -> None:
    args = ["--loop", "slow_backward"]
    faults = (("rank3", "backward", 14),)
    with Cluster(tmp_path, workers=5, args=args, faults=faults, script=LOOPS) as run:
        assert run.finish() == 0
        assert len(run.results()) == 4
        expected = alone(*args, script=LOOPS)
        assert all(same(result, expected) for result in run.results().values())
        aborted = [line for line in run.output().splitlines() if "backward aborted" in line]
    assert len(aborted) == 4


def test_a_worker_that_joins_later_skips_past_sums(tmp_path: Path, alone: Alone) -> None:
    args = ["--loop", "sums", *HELD]
    with Cluster(tmp_path, workers=3, restarts=1, args=args, script=LOOPS) as run:
        status = run.until_training(3)
        run.until_step(3)  # past the sum before the first batch
        run.signal("w1")  # its replacement calls that sum, too
        run.until_training(3, after=status["generation"])
        assert run.finish() == 0
        expected = alone(*args, *run.epochs, script=LOOPS)
        assert all(same(result, expected) for result in run.results().values())
        seen = [line for line in run.output().splitlines() if "samples seen before" in line]
    assert len(seen) == 4
    assert all(" 50 samples" in line for line in seen)


def test_a_worker_that_joins_a_loop_over_plain_epochs_begins_in_the_runs_epoch(
    tmp_path: Path, alone: Alone
) -> None:
    """Its loops over epochs that are over are empty, and their schedule does not step."""
    args = ["--loop", "plain_epochs", *HELD]
    with Cluster(tmp_path, workers=3, restarts=1, args=args, script=LOOPS) as run:
        status = run.until_training(3)
        run.until_step(25)  # in the third epoch
        run.signal("w1")
        run.until_training(3, after=status["generation"])
        assert run.finish() == 0
        assert "the loop over epoch 0 has no batches: the run is in epoch" in run.output()
        expected = alone(*args, *run.epochs, script=LOOPS)
        assert all(same(result, expected) for result in run.results().values())


@pytest.mark.parametrize("loop", [pytest.param("weighted", marks=LONG), "streamed", "looked"])
def test_workers_that_join_or_resume_go_on_in_the_data_of_the_others(
    loop: str, tmp_path: Path, alone: Alone
) -> None:
    args = ["--loop", loop, *HELD]
    with Cluster(tmp_path, workers=3, restarts=1, args=args, script=LOOPS) as run:
        status = run.until_training(3)
        run.until_step(13)  # in the second epoch
        run.signal("w1")
        status = run.until_training(3, after=status["generation"])
        run.until_step(status["step"] + 3)
        run.ask("stop")
        assert run.wait() == 0
    with Cluster(tmp_path, workers=2, args=args, script=LOOPS) as run:
        run.until_training(2)
        assert run.finish() == 0
        assert "resuming from step-" in run.output()
        expected = alone(*args, *run.epochs, script=LOOPS)
        assert all(same(result, expected) for result in run.results().values())


def test_sums_of_unusual_dtypes_lose_no_worker(tmp_path: Path, alone: Alone) -> None:
    args = ["--loop", "dtypes", "--epochs", "1"]
    with Cluster(tmp_path, workers=2, args=args, script=LOOPS) as run:
        assert run.finish() == 0
        assert run.output().count(" in generation ") == 2  # there was one
        expected = alone(*args, script=LOOPS)
        assert all(same(result, expected) for result in run.results().values())


def test_nobody_joins_between_an_epoch_and_the_sums_after_it(tmp_path: Path, alone: Alone) -> None:
    """A joiner would begin the next epoch, and not take part in them."""
    args = ["--loop", "left_at_its_end", *HELD]
    with Cluster(tmp_path, workers=3, max_workers=4, args=args, script=LOOPS) as run:
        status = run.until_training(3)
        until(lambda: run.output().count("at the gate") == 3)
        run.ask("scale", num_workers=4)
        run.until(
            lambda s: any(w["state"] == "training" and w["rank"] is None for w in s["workers"])
        )
        (run.out / "gate").touch()
        run.until_training(4, after=status["generation"])
        run.until_step(25)
        assert run.finish() == 0
        expected = alone(*args, *run.epochs, script=LOOPS)
        assert len(run.results()) == 4
        assert all(same(result, expected) for result in run.results().values())


def test_a_joiner_whose_stream_differs_is_left_out(tmp_path: Path, alone: Alone) -> None:
    args = ["--loop", "other_stream", *HELD]
    with Cluster(tmp_path, workers=3, restarts=1, args=args, script=LOOPS) as run:
        until(lambda: run.output().count("at the gate") == 3)
        run.signal("w1")  # its replacement is w3
        run.until(lambda s: any(w["state"] == "ready" for w in s["workers"]))
        (run.out / "gate").touch()
        until(lambda: "gives the samples of epoch" in run.output())
        run.until_training(2)
        assert run.finish() == 0
        assert set(run.results()) == {"w0", "w2"}
        expected = alone(*args, *run.epochs, script=LOOPS)
        assert all(same(result, expected) for result in run.results().values())
