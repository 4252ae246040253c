"""What `evenstep top` says of a run whose coordinator does not answer any more; no time passes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evenstep.cli.top import WatchedRun
from evenstep.coordinate.run_folder import JOURNAL
from evenstep.journal import Record
from evenstep.types import Joined, Left, Lost, StepDone, StepReport, Worker
from tests.observe.a_status import NO_TOTALS, status
from tests.observe.runs import write_journal

BEGUN = [Record(at_s=0.0, event=Joined(workers=(Worker(id="w0", price_per_hour=3.0),)))]
STEPS = [
    Record(
        at_s=1.0 + step,
        event=StepDone(step=step, generation=1, seconds=1.0, reports=(StepReport("w0", 4, 1.0),)),
    )
    for step in range(400)
]


def left(cause: str) -> Record:
    return Record(at_s=500.0, event=Left(workers=("w0",), cause=cause))


class SilentCoordinator:
    """Answers so many times; time passes only where it is slept."""

    def __init__(self, run: str, num_answers: int, **told: Any) -> None:
        self.now_s, self.num_left, self._told = 0.0, num_answers, told
        self.watched = WatchedRun(run, self._ask, clock=lambda: self.now_s, sleep=self._sleep)

    def _ask(self) -> dict[str, Any]:
        if not self.num_left:
            raise ConnectionRefusedError("nobody there")
        self.num_left -= 1
        return status(trained_to_end=False, **self._told)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds


def run_of(folder: Path, records: Sequence[Record]) -> str:
    write_journal(folder / JOURNAL, records)
    return str(folder)


@pytest.mark.parametrize("cause", ["trained to the end", "stopped: SIGINT"])
def test_a_run_whose_journal_has_its_end_is_over_at_once_with_all_of_its_steps(
    cause: str, tmp_path: Path
) -> None:
    there = SilentCoordinator(run_of(tmp_path, [*BEGUN, *STEPS, left(cause)]), 2)
    assert [told["state"] for told in there.watched.statuses(1.0)] == ["training", "training"]
    assert there.now_s == 2.0
    words = there.watched.last_words()
    assert words[0] == f"the run is over: {cause}"
    assert words[1].startswith("trained       400 steps, 1,600 samples")
    assert words[-1].startswith("cost          0.4")


@pytest.mark.parametrize("last", [[], [Record(at_s=500.0, event=Lost(workers=("w0",)))]])
def test_workers_may_train_on_without_a_coordinator(last: list[Record], tmp_path: Path) -> None:
    run = run_of(tmp_path, [*BEGUN, *STEPS, *last])
    there = SilentCoordinator(run, 1)
    states = [told["state"] for told in there.watched.statuses(10.0)]
    assert states == ["training", "no answer", "no answer", "no answer"]
    words = there.watched.last_words()
    assert words[0] == (
        "no coordinator answers; workers may train on for up to the lease; "
        f"`evenstep run --resume {run}` goes on with the run"
    )
    assert words[1].startswith("trained       400 steps")


def test_the_totals_are_those_of_whoever_knows_more_steps(tmp_path: Path) -> None:
    told = {**NO_TOTALS["totals"], "num_steps": 500, "samples": 2000, "trained_s": 500.0}
    run = run_of(tmp_path, [*BEGUN, *STEPS])
    there = SilentCoordinator(run, 1, totals=told)
    assert list(there.watched.statuses(40.0))
    assert there.watched.last_words()[1].startswith("trained       500 steps, 2,000 samples")


def test_a_coordinator_that_comes_back_is_watched_on(tmp_path: Path) -> None:
    there = SilentCoordinator(run_of(tmp_path, BEGUN), 1)
    states = []
    for told in there.watched.statuses(10.0):
        states.append(told["state"])
        there.num_left = 2 * (states == ["training", "no answer"])
        if len(states) == 4:
            break
    assert states == ["training", "no answer", "training", "no answer"]


def test_on_another_host_the_last_answer_says_whether_it_was_ending() -> None:
    there = SilentCoordinator("127.0.0.1:7", 1, state="stopping", reason="SIGTERM")
    assert len(list(there.watched.statuses(10.0))) == 1
    assert there.watched.last_words() == ["the run is over: SIGTERM"]
