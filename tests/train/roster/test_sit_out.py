"""Ranks that sit out the sums of the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from evenstep.train.comm.summing import SUMMED, WIDER, summed_wide
from evenstep.train.roster.sit_out import announce_batch, announce_sum, sit_out
from tests.train.comm.test_group import ring

SUMS = [torch.arange(5.0), torch.tensor(3, dtype=torch.int64), torch.ones(2, 3).double()]


def test_sums_are_those_of_the_others() -> None:
    ranks = ring(3)

    def take_part(rank: int) -> list[torch.Tensor]:
        if rank == 0:
            sit_out(ranks[rank], root=1)
            return []
        sums = []
        for values in SUMS:
            announce_sum(ranks[rank], 1, values)
            sums.append(ranks[rank].sum(values.clone()))
        announce_batch(ranks[rank], 1)
        return sums

    with ThreadPoolExecutor(3) as pool:
        nothing, *sums = pool.map(take_part, range(3))
    for group in ranks:
        group.close()
    assert nothing == []
    for summed in sums:
        assert all(torch.equal(a, 2 * b) for a, b in zip(summed, SUMS, strict=True))


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("dtype", [*SUMMED, *WIDER])
def test_a_sum_of_any_dtype_arrives_as_one_that_can_be_announced(dtype: torch.dtype) -> None:
    arrived: list[torch.Tensor] = []

    def add_up(values: torch.Tensor) -> torch.Tensor:
        arrived.append(values)
        return values * 2

    values = torch.ones(3).to(dtype)
    summed = summed_wide(values, add_up)
    assert arrived[0].dtype in SUMMED
    assert summed.dtype == dtype
    expected = values if dtype == torch.bool else torch.full((3,), 2.0).to(dtype)
    assert torch.equal(summed.to(torch.complex64), expected.to(torch.complex64))
