"""Which ranks of a new generation have the newest state, when some miss a result."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from evenstep.train.roster.catch_up import NewestState, Position, Situation, compare_positions
from tests.train.comm.test_group import ring


def compared(positions: Sequence[Position], situations: Sequence[Situation] = ()) -> NewestState:
    """What ranks at these positions agree on."""
    situations = situations or [Situation()] * len(positions)
    ranks = ring(len(positions))
    with ThreadPoolExecutor(len(ranks)) as pool:
        found = list(pool.map(compare_positions, ranks, positions, situations))
        for rank in ranks:
            rank.close()
    assert all(one == found[0] for one in found)
    return found[0]


def at(steps: int, sums: int = 0) -> Position:
    return Position(has_state=True, steps=steps, sums=sums, sum_bytes=8 * sums)


def test_the_highest_reduced_step_wins_and_all_ranks_that_have_it_are_sources() -> None:
    newest = compared([at(5), at(6), Position(), at(6), at(4)])
    assert newest.sources == (1, 3)
    assert (newest.position.has_state, newest.position.steps) == (True, 6)


def test_a_step_that_two_generations_reduced_counts_as_in_the_later_one() -> None:
    """A joiner whose join failed has step 5 of generation 7; the others repeated it in 8."""
    later, earlier = (Position(has_state=True, steps=6, reduced_in=n) for n in (8, 7))
    newest = compared([earlier, later, Position(has_state=True, steps=5, reduced_in=9), later])
    assert newest.sources == (1, 3)
    assert newest.position.reduced_in == 8


def test_if_no_rank_has_a_state_the_leader_is_the_source() -> None:
    newest = compared([Position(), Position(), Position()])
    assert newest.sources == (0,)
    assert not newest.position.has_state


def test_sources_without_the_last_sum_are_listed() -> None:
    newest = compared([at(6, sums=2), at(6, sums=3), at(5, sums=9)])
    assert (newest.sources, newest.missing_sum) == ((0, 1), (0,))
    assert (newest.position.sums, newest.position.sum_bytes) == (3, 24)


def test_only_gradients_of_sources_belong_to_the_state() -> None:
    have, lack = Situation(has_gradients=True), Situation()
    assert compared([at(6), at(5)], [have, lack]).has_gradients
    assert not compared([at(6), at(5)], [lack, have]).has_gradients


def test_newcomers_are_told_apart_from_ranks_that_wait_for_a_sum() -> None:
    positions = [at(6, sums=3), at(6, sums=2), Position(), at(6, sums=3), at(5), at(5)]
    in_sum = Situation(between_steps=False)
    void = Situation(between_steps=False, is_void=True)
    newest = compared(positions, [in_sum, in_sum, Situation(), void, void, Situation()])
    assert newest.missing_sum == (1,)
    assert newest.waiting == (0,)  # rank 1 gets the sum that it waits for, rank 3's is void
    assert newest.newcomers == (2,)


def test_ranks_that_miss_the_last_sum_receive_it() -> None:
    ranks = ring(3)
    kept = [torch.zeros(0, dtype=torch.uint8), torch.arange(4, dtype=torch.uint8)]
    kept.append(torch.zeros(0, dtype=torch.uint8))
    positions = [
        at(6, sums=2),
        Position(has_state=True, steps=6, sums=3, sum_bytes=4),
        at(6, sums=2),
    ]

    def learn(rank: int) -> torch.Tensor:
        newest = compare_positions(ranks[rank], positions[rank])
        return newest.share_last_sum(ranks[rank], kept[rank])

    with ThreadPoolExecutor(3) as pool:
        sums = list(pool.map(learn, range(3)))
    for rank in ranks:
        rank.close()
    assert all(torch.equal(one, kept[1]) for one in sums)
