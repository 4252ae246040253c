"""Ranks that sit out the sums of the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from evenstep.train.roster.sit_out import DTYPES, announce_batch, announce_sum, sit_out
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


def test_every_dtype_of_a_sum_can_be_announced() -> None:
    assert len({str(dtype) for dtype in DTYPES}) == len(DTYPES)
    assert {torch.float32, torch.bfloat16, torch.complex128, torch.bool} <= set(DTYPES)
