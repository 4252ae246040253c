"""Who of a new generation is furthest, when some have a result that others miss."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from evenstep.train.roster.position import Ahead, Position, compare_positions
from tests.train.comm.test_group import ring


def compared(positions: Sequence[Position], gradients: Sequence[bool] = ()) -> Ahead:
    """What ranks at these positions agree on."""
    used = gradients or [False] * len(positions)
    ranks = ring(len(positions))
    with ThreadPoolExecutor(len(ranks)) as pool:
        told = list(
            pool.map(lambda g, p, u: compare_positions(g, p, gradients=u), ranks, positions, used)
        )
        for rank in ranks:
            rank.close()
    assert all(one == told[0] for one in told)
    return told[0]


def at(steps: int, sums: int = 0) -> Position:
    return Position(begun=True, steps=steps, sums=sums, sum_bytes=8 * sums)


def test_the_highest_reduced_step_wins_and_all_who_have_it_are_sources() -> None:
    ahead = compared([at(5), at(6), Position(), at(6), at(4)])
    assert ahead.sources == (1, 3)
    assert (ahead.position.begun, ahead.position.steps) == (True, 6)


def test_where_nobody_has_begun_the_leader_is_the_source() -> None:
    ahead = compared([Position(), Position(), Position()])
    assert ahead.sources == (0,)
    assert not ahead.position.begun


def test_sources_that_miss_the_last_sum_are_late() -> None:
    ahead = compared([at(6, sums=2), at(6, sums=3), at(5, sums=9)])
    assert (ahead.sources, ahead.late) == ((0, 1), (0,))
    assert (ahead.position.sums, ahead.position.sum_bytes) == (3, 24)


def test_only_gradients_of_sources_belong_to_the_state() -> None:
    assert compared([at(6), at(5)], gradients=[True, False]).gradients
    assert not compared([at(6), at(5)], gradients=[False, True]).gradients


def test_the_last_sum_reaches_those_who_miss_it() -> None:
    ranks = ring(3)
    kept = [torch.zeros(0, dtype=torch.uint8), torch.arange(4, dtype=torch.uint8)]
    kept.append(torch.zeros(0, dtype=torch.uint8))
    positions = [at(6, sums=2), Position(begun=True, steps=6, sums=3, sum_bytes=4), at(6, sums=2)]

    def learn(rank: int) -> torch.Tensor:
        ahead = compare_positions(ranks[rank], positions[rank], gradients=False)
        return ahead.last_sum(ranks[rank], kept[rank])

    with ThreadPoolExecutor(3) as pool:
        sums = list(pool.map(learn, range(3)))
    for rank in ranks:
        rank.close()
    assert all(torch.equal(one, kept[1]) for one in sums)
