"""Decisions stay within their time budget and are made when they matter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.pace import (
    BUDGET_FRACTION,
    BURST_S,
    BURST_STEPS,
    MAX_STEP_RATIO,
    MIN_CHANGE,
    WATCHED_STEPS,
    MeanTimes,
    Pacer,
)
from evenstep.types import SHORTEST_S

ROUNDING_S = 1e-9


@dataclass(frozen=True, slots=True)
class Step:
    """A step, and the duration and outcome of a decision on it."""

    after_s: float
    compute_s: Sequence[float]
    took_s: float
    moved: bool


def seconds(most: float) -> st.SearchStrategy[float]:
    return st.floats(0.0, most)


steps = st.builds(
    Step,
    after_s=seconds(1.0) | seconds(100.0),
    compute_s=st.lists(seconds(10.0), max_size=5),
    took_s=seconds(0.005) | seconds(0.5) | seconds(5.0),
    moved=st.booleans(),
)


def with_idle(idle: float) -> list[float]:
    """Compute times of two workers with this idle fraction, at most a half."""
    return [1.0, 1.0 - 2.0 * idle]


def run(pace: Pacer, history: Sequence[Step], now_s: float = 0.0) -> list[tuple[float, float]]:
    """The time and duration of each decision."""
    decisions = []
    for step in history:
        now_s += step.after_s
        if pace.should_decide(now_s, step.compute_s):
            pace.decided(step.took_s, moved=step.moved)
            decisions.append((now_s, step.took_s))
    return decisions


def calm(num: int, after_s: float, took_s: float = 0.0, idle: float = 0.0) -> list[Step]:
    return [Step(after_s, with_idle(idle), took_s, False)] * num


@given(st.lists(steps, max_size=60))
def test_decisions_stay_within_their_budget_over_any_period(history: list[Step]) -> None:
    decisions = run(Pacer(), history)
    longest_s = max((s for step in history for s in step.compute_s), default=0.0)
    saved_s = max(BURST_S, BURST_STEPS * longest_s)
    for first, (begin_s, _) in enumerate(decisions):
        spent_s = 0.0
        for now_s, took_s in decisions[first:]:
            # The last decision may overdraw the budget; the debt is repaid before the next.
            assert spent_s <= saved_s + BUDGET_FRACTION * (now_s - begin_s) + ROUNDING_S
            spent_s += took_s


@given(
    idle=st.floats(0.0, 0.4),
    jitter=st.lists(st.floats(0.0, 0.99 * MIN_CHANGE), min_size=200, max_size=200),
    after_s=st.floats(0.001, 1.0),
    took_s=st.floats(0.0001, 0.01),
)
def test_decisions_are_rare_while_calm(
    idle: float, jitter: list[float], after_s: float, took_s: float
) -> None:
    history = [Step(after_s, with_idle(idle + more), took_s, False) for more in jitter]
    decisions = run(Pacer(), history)
    later = [now_s for now_s, _ in decisions[WATCHED_STEPS:]]
    for before_s, now_s in pairwise(later):  # half of the budget, so that the bucket refills
        assert now_s - before_s >= 2 * took_s / BUDGET_FRACTION - ROUNDING_S


@given(after_s=st.floats(0.001, 1.0), took_s=st.floats(0.0001, 0.01), most=st.floats(0.0, 0.5))
def test_known_noise_does_not_make_decisions_more_frequent(
    after_s: float, took_s: float, most: float
) -> None:
    pace = Pacer()
    noise = [Step(after_s, with_idle(idle), took_s, False) for idle in (0.0, most)]
    run(pace, noise * 20)
    later = [now_s for now_s, _ in run(pace, noise * 100, 40 * after_s)]
    for before_s, now_s in pairwise(later):
        assert now_s - before_s >= 2 * took_s / BUDGET_FRACTION - ROUNDING_S


@given(
    idle=st.floats(0.0, 0.4),
    more=st.floats(1.5 * MIN_CHANGE, 0.1),
    history=st.lists(steps, max_size=20),
    after_s=st.floats(0.0, 1.0),
)
def test_a_change_is_decided_on_at_once_if_there_is_budget(
    idle: float, more: float, history: list[Step], after_s: float
) -> None:
    pace = Pacer()
    # A long calm first: the EWMA forgets the past, but the bucket does not fill up.
    owed_s = now_s = 0.0
    for step in [*history, *calm(60, after_s, 0.001, idle)]:
        longest = max(step.compute_s, default=0.0)
        most_s = MAX_STEP_RATIO * longest if longest > SHORTEST_S else math.inf
        owed_s = max(0.0, owed_s - BUDGET_FRACTION * min(step.after_s, most_s))
        owed_s += sum(took_s for _, took_s in run(pace, [step], now_s))
        now_s += step.after_s
    changed = with_idle(idle + more)
    left_s = max(BURST_S, BURST_STEPS * max(changed)) - owed_s
    if abs(left_s) > ROUNDING_S:
        assert pace.should_decide(now_s, changed) == (left_s > 0)


@given(
    breaks=st.lists(st.floats(0.0, 1000.0), min_size=80, max_size=80),
    idle=st.lists(st.floats(0.0, 0.4), min_size=80, max_size=80),
    took_s=st.floats(0.001, 0.05),
)
def test_time_without_training_does_not_fill_the_bucket(
    breaks: list[float], idle: list[float], took_s: float
) -> None:
    def asked_in(breaks: Sequence[float]) -> list[int]:
        pace, now_s, asked = Pacer(), 0.0, []
        for i, (more_s, part) in enumerate(zip(breaks, idle, strict=True)):
            now_s += MAX_STEP_RATIO + more_s
            if pace.should_decide(now_s, with_idle(part)):
                pace.decided(took_s, moved=False)
                asked.append(i)
        return asked

    assert asked_in(breaks) == asked_in([0.0] * 80)


def test_steps_between_two_calls_count_as_training() -> None:
    one_by_one, at_once = Pacer(), Pacer()
    run(one_by_one, calm(WATCHED_STEPS, 1.0, 0.01))
    run(at_once, calm(WATCHED_STEPS, 1.0, 0.01))
    waited = [one_by_one.should_decide(WATCHED_STEPS + i, with_idle(0.0)) for i in range(1, 5)]
    assert waited == [False, False, False, True]
    assert at_once.should_decide(WATCHED_STEPS + 4.0, with_idle(0.0), num=4)


@given(st.integers(0, 40), st.floats(0.001, 0.1))
def test_only_the_watched_steps_after_a_plan_are_decided_on(before: int, after_s: float) -> None:
    pace = Pacer()
    run(pace, calm(WATCHED_STEPS + before, after_s, 0.01))
    now_s = (WATCHED_STEPS + before) * after_s
    pace.decided(0.02, moved=True)
    wanted = [
        pace.should_decide(now_s + i * after_s, with_idle(0.1)) for i in range(1, 2 * WATCHED_STEPS)
    ]
    assert wanted == [True] * WATCHED_STEPS + [False] * (WATCHED_STEPS - 1)


@pytest.mark.parametrize("compute_s", [[], [0.0], [0.0, 0.0], [0.0, 1.0], [1.0], [5e-324, 0.0]])
def test_any_compute_times_are_accepted(compute_s: list[float]) -> None:
    pace = Pacer()
    run(pace, [Step(0.01, compute_s, 0.001, False)] * 20)
    assert pace.should_decide(1e6, compute_s)


def test_a_single_worker_triggers_no_decisions() -> None:
    pace = Pacer()
    run(pace, [Step(1.0, [1.0], 0.01, False)] * WATCHED_STEPS)
    sizes = [0.1, 5.0, 0.0, 1.0]  # a single worker is never idle
    assert not any(
        pace.should_decide(WATCHED_STEPS + i * 0.1, [size]) for i, size in enumerate(sizes)
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from([(), (3,), (1, 2), (2, 1)]),  # samples
            st.lists(st.floats(0.0, 10.0), min_size=1, max_size=4),  # seconds per sample, by step
            st.booleans(),  # restart
            st.booleans(),  # a decision was made
        ),
        max_size=30,
    )
)
def test_means_cover_equal_steps_since_the_last_decision(
    history: list[tuple[tuple[int, ...], list[float], bool, bool]],
) -> None:
    means, like, before = MeanTimes(), list[float](), tuple[int, ...]()
    for samples, steps_s, anew, asked in history:
        given = [fmean(steps_s) * n for n in samples], [pstdev(steps_s) * n for n in samples]
        means.add(samples, *given, restart=anew, num=len(steps_s))
        if anew or samples != before:
            like.clear()
        like, before = [*like, *steps_s], samples
        if asked:
            told = means.take()
            assert [mean_s for mean_s, _ in told] == pytest.approx(
                [fmean(like) * n for n in samples]
            )
            spread = [pstdev(like) * n for n in samples]
            assert [s for _, s in told] == pytest.approx(spread, abs=1e-6)
            like.clear()


def test_a_change_and_the_steps_after_it_are_eventful() -> None:
    pace = Pacer()
    run(pace, calm(50, 1.0))
    assert not pace.eventful
    for i, idle in enumerate([0.3] + [0.0] * WATCHED_STEPS):
        pace.should_decide(51.0 + i, with_idle(idle))
        assert pace.eventful
    pace.should_decide(60.0, with_idle(0.0))
    assert not pace.eventful
