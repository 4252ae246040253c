"""Each worker's share of one common order, cut by the plan in force."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Sampler

from evenstep.train.comm.host import ALONE, Host
from evenstep.train.data.order import Order
from evenstep.train.data.position import DataPosition
from evenstep.train.step import Batch


class ShareSampler(Sampler[list[Any]]):
    """The indices of this worker's share, or its samples of a stream, from a given position on.

    A worker without a share in a step gets a stand-in of one sample that counts for nothing, so
    that the user's loop never sees an empty batch.
    """

    def __init__(
        self,
        order: Order,
        shares_at: Callable[[int], tuple[int, ...]],
        rank: int,
        host: Host = ALONE,
    ) -> None:
        self.order, self.rank, self._host = order, rank, host
        self.position, self.step = DataPosition(), 0  # where to begin
        self.batches: deque[Batch] = deque()  # one for each that was drawn
        self._shares_at = shares_at

    def __iter__(self) -> Iterator[list[Any]]:
        order, batches, position, step = self.order, self.batches, self.position, self.step
        epoch, begin = position.epoch, position.cursor
        while True:
            end, ranges = order.cut(epoch, begin, self._shares_at(step))
            if end == begin:
                return
            low, high = ranges[self.rank]
            samples = high - low
            low, high = self._host.part(low, high)
            batches.append(
                Batch(
                    step=step,
                    samples=samples,
                    own=high - low,
                    weight=samples,
                    part=(high - low) / samples if samples else 0.0,
                    begin=low if high > low else 0,  # a stand-in is the batch's first sample
                    total=end - begin,
                    position=position.before + begin,
                    epoch=epoch,
                    digest=order.samples.digest(epoch, begin, end),
                )
            )
            first, last = (begin + low, begin + high) if high > low else (begin, begin + 1)
            yield order.samples.items(epoch, first, last)
            begin, step = end, step + 1
