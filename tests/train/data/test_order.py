"""Each sample is used once per epoch, whatever the shares, rosters and global batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evenstep.train.data.order import Order
from evenstep.train.data.permutation import sequential, shuffled
from evenstep.train.data.position import DataPosition
from evenstep.train.data.share_sampler import ShareSampler

SHARES = st.integers(0, 9)


@given(
    length=st.integers(1, 60),
    plans=st.lists(st.lists(SHARES, min_size=3, max_size=3).filter(any), min_size=1, max_size=8),
    epoch=st.integers(0, 3),
)
def test_the_ranks_together_use_every_sample_of_an_epoch(
    length: int, plans: list[list[int]], epoch: int
) -> None:
    def shares_at(step: int) -> tuple[int, ...]:
        return tuple(plans[min(step, len(plans) - 1)])

    order = Order(shuffled(length, seed=0))
    batches = []
    for rank in range(3):
        sampler = ShareSampler(order, shares_at, rank)
        sampler.position = DataPosition(epoch=epoch)
        batches.append(list(sampler))
    begin, seen = 0, []
    for step, parts in enumerate(zip(*batches, strict=True)):
        num = order.end(epoch, begin, sum(shares_at(step))) - begin
        expected = order.samples.items(epoch, begin, begin + num)
        # A worker without a share gets a sample of the step as a stand-in.
        used = [i for part in parts for i in part]
        assert set(used) == set(expected)
        seen += expected
        begin += num
    assert sorted(seen) == list(range(length))


@given(length=st.integers(1, 60), batch=st.integers(1, 20))
def test_the_last_short_step_may_be_dropped(length: int, batch: int) -> None:
    order = Order(shuffled(length, seed=0), drop_last=True)
    ends, begin = [], 0
    while (end := order.end(0, begin, batch)) > begin:
        ends.append(end)
        begin = end
    assert ends == list(range(batch, length + 1, batch))
    assert len(ends) == order.num_steps(batch)
    assert Order(shuffled(length, seed=0)).num_steps(batch) == -(-length // batch)


def test_a_sampler_continues_at_a_sample_with_another_batch() -> None:
    order = Order(sequential(10))
    sampler = ShareSampler(order, lambda step: (3, 1) if step >= 7 else (1, 1), 0)
    sampler.position, sampler.step = DataPosition(cursor=2), 6
    assert list(sampler) == [[2], [4, 5, 6], [8, 9]]
