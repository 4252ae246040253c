"""Membership in any order of messages, deaths, cuts and takeovers.

Generations take steps one after the other, never two at once; workers that take a step together
have taken the same steps before; and a run that is left alone comes to an end.
"""

from __future__ import annotations

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.coordinate.histories import live

NUM_ACTIONS = (30, 80)
NUM_SHORT = 150
NUM_LONG, NUM_PARTS = 100_000, 100  # each part is well within the bound of one test

histories = st.binary(min_size=2 + 2 * NUM_ACTIONS[0], max_size=2 + 2 * NUM_ACTIONS[1])


def check(number: str, num_histories: int, *, replays: bool) -> None:
    """Draw histories, let them happen, and shrink one that goes wrong."""

    @seed(number)
    @settings(max_examples=num_histories)
    @given(histories)
    def test(history: bytes) -> None:
        live(history, replays=replays)

    test()


def test_no_history_makes_two_generations_train_or_a_run_hang() -> None:
    check("0", NUM_SHORT, replays=True)


@pytest.mark.long
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_none_of_a_hundred_thousand_histories_does(seed: int, part: int) -> None:
    check(f"{seed} {part}", NUM_LONG // NUM_PARTS, replays=False)
