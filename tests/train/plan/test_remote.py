"""The leader reports every step to the coordinator, many steps per message."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.messages import Generation, Stepped
from evenstep.pace import BUDGET_FRACTION, BURST_S, WATCHED_STEPS
from evenstep.train.plan.remote import MESSAGE_S, RemotePlanner
from evenstep.train.step import Batch, Report, Step

STEP_S, SHARE = 0.01, 32


class Run:
    """The leader of two workers on a fake clock; `sent` has its messages."""

    def __init__(self) -> None:
        self.now_s, self.step, self.sent = 0.0, 0, list[Stepped]()
        self.planner = RemotePlanner(self, self, lambda: self.now_s)
        self.leads, self.generation, self.last = True, 0, Step()

    def take_plan(self, generation: int) -> None:
        return None

    def send(self, message: Stepped) -> None:
        self.sent.append(message)

    def train(self, number: int, steps: Sequence[Sequence[float]]) -> None:
        """Take these steps in a new generation."""
        by = Generation(
            number=number,
            roster=("a", "b"),
            shares=(SHARE, SHARE),
            reason="",
            planned=True,
        )
        step = Step()
        for both in steps:
            self.now_s += STEP_S
            reports = [
                Report(
                    samples=SHARE,
                    compute_s=compute_s,
                    wait_s=STEP_S - compute_s,
                    free_cpu=1.0,
                    free_memory=1.0,
                    weight=float(SHARE),
                )
                for compute_s in both
            ]
            step = Step()
            step.batch, step.seconds = Batch(step=self.step), STEP_S
            step.reports, step.reduced_by = reports, by
            self.step = step.number = self.step + 1
            self.planner.report(step)
        self.last = step


EVEN = (STEP_S, STEP_S)
UNEVEN = (STEP_S, 0.3 * STEP_S)


def test_calm_steps_share_a_message() -> None:
    run = Run()
    run.train(1, [EVEN] * 1000)
    assert len(run.sent) < 1000 * STEP_S * BUDGET_FRACTION / MESSAGE_S + WATCHED_STEPS
    assert [m.step for m in run.sent[:WATCHED_STEPS]] == list(range(WATCHED_STEPS))
    last = run.sent[-1]
    assert sum(1 + m.quiet.num for m in run.sent) == last.step + 1
    assert last.quiet.seconds > 0
    assert last.quiet.samples == 2 * SHARE * last.quiet.num


@pytest.mark.parametrize("num_steps", range(995, 1005))
def test_the_last_step_is_reported_at_the_end(num_steps: int) -> None:
    run = Run()
    run.train(1, [EVEN] * num_steps)
    run.planner.close(run.last)
    run.planner.close(run.last)
    assert sum(1 + m.quiet.num for m in run.sent) == num_steps
    assert run.sent[-1].step == num_steps - 1


def test_a_step_that_was_not_completed_is_not_reported() -> None:
    run = Run()
    run.train(1, [EVEN] * 1000)
    num_sent = len(run.sent)
    run.last.fetched(Batch(step=1000), 0.0)
    run.planner.close(run.last)
    assert len(run.sent) == num_sent


def test_a_change_is_reported_at_once() -> None:
    run = Run()
    run.train(1, [EVEN] * 200)
    run.train(2, [EVEN] * 200)
    first = next(m for m in run.sent if m.generation == 2)
    assert first.step == 200
    assert first.quiet.num == 0  # earlier steps had another roster; only their samples count
    assert sum(2 * SHARE + m.quiet.samples for m in run.sent[: run.sent.index(first) + 1]) == (
        2 * SHARE * 201
    )
    assert sum(1 + m.quiet.num + m.earlier.num for m in run.sent) == run.sent[-1].step + 1
    run.sent.clear()
    run.train(2, [EVEN] * 100 + [UNEVEN] * 10)
    assert {400 + 100 + i for i in range(WATCHED_STEPS)} <= {m.step for m in run.sent}


def test_calm_steps_are_reported_as_their_mean_and_a_change_by_itself() -> None:
    run = Run()
    noise = [(STEP_S, STEP_S * (0.99 + 0.0001 * (i % 100))) for i in range(500)]
    run.train(1, [*noise, UNEVEN])
    for message in run.sent[WATCHED_STEPS:-1]:
        since = noise[message.step - message.quiet.num : message.step + 1]
        means = [fmean(column) for column in zip(*since, strict=True)]
        assert [r.compute_s for r in message.reports] == pytest.approx(means)
    assert max(m.quiet.num for m in run.sent) > 10
    last = run.sent[-1]
    assert (last.step, [r.compute_s for r in last.reports]) == (500, list(UNEVEN))


times = st.sampled_from([EVEN, UNEVEN, (0.5 * STEP_S, STEP_S)])


@given(st.lists(st.lists(times, max_size=200), max_size=8))
def test_every_step_is_reported_once_within_the_message_budget(
    history: list[list[tuple[float, float]]],
) -> None:
    run = Run()
    for number, steps in enumerate(history):
        run.train(number, steps)
    samples = sum(2 * SHARE + m.quiet.samples for m in run.sent)
    if run.sent:
        assert samples == 2 * SHARE * (run.sent[-1].step + 1)
    assert len(run.sent) <= (BURST_S + BUDGET_FRACTION * run.now_s) / MESSAGE_S + 1
