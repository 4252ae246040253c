"""Features of the whole batch on every worker, with gradients: for losses over pairs of samples.

Every worker's loss L_w may depend on every row. The run's loss is the mean of all L_w, each
weighted by its worker's part p_w of the batch, so the gradient of a row is the sum of p_w dL_w/drow
over all workers. The row's own worker passes that on divided by its p_w, since its gradients are
weighted by that again when they are reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from evenstep.errors import EvenstepError
from evenstep.train.comm.group import Group, GroupGoneError
from evenstep.train.comm.summing import check_summable, summed_wide
from evenstep.train.reduce.batch_norm import SyncContext
from evenstep.train.step import Batch, Step


class FeatureGroup:
    """Gathers rows over the workers of one generation, on a group of its own.

    On the gradients' group, its sums and the buckets' could start in different orders. Most scripts
    gather nothing, so the group is made at the first use, which all workers reach together.
    """

    def __init__(
        self,
        step: Step,
        world: int,
        make: Callable[[], Group],
        on_wait: Callable[[float], None],
        on_lost: Callable[[GroupGoneError], None] | None,
        is_over: Callable[[], bool],
    ) -> None:
        self._step, self._world, self._is_over = step, world, is_over
        self._make, self._on_wait, self._on_lost = make, on_wait, on_lost
        self._context: SyncContext | None = None

    def gather(self, rows: Tensor, *, is_weighted: bool) -> Tensor:
        """The rows of the whole batch. `is_weighted`: losses are weighted by more than samples."""
        check_summable(rows, "session.gather")
        if self._world == 1:
            return rows
        batch = self._step.batch
        context = None if self._step.is_void else self._connected()
        if context is None or context.group is None:
            return place(rows, batch)  # the step is void: any values of the right shape will do
        part = batch.samples / batch.total
        if is_weighted:
            part = self._weighted_part(batch, context, context.group, rows.requires_grad)
        gathered: Tensor = Gather.apply(  # type: ignore[no-untyped-call]
            rows, context, context.group, batch, part
        )
        return gathered

    def _weighted_part(
        self, batch: Batch, context: SyncContext, group: Group, needs_grad: bool
    ) -> float:
        """This worker's part in the weights of the batch."""
        weighs_nothing = bool(batch.samples) and not batch.weight
        sums = context.sum(torch.tensor([batch.weight, weighs_nothing]).double(), group)
        total, num_weightless = sums.tolist()
        if num_weightless and needs_grad and not self._step.is_void:
            raise EvenstepError(
                f"in step {batch.step} the samples of {int(num_weightless)} of {self._world} "
                "workers weigh nothing, by weight=..., so that gradients which flow back to their "
                "rows through session.gather would be lost. Return a weight above 0 for every "
                "batch, or gather features.detach()."
            )
        return batch.weight / total if total else 0.0

    def _connected(self) -> SyncContext | None:
        if self._context is None:
            try:
                group = self._make()
            except GroupGoneError as e:
                if self._on_lost is None:
                    raise
                self._on_lost(e)
                return None
            self._context = SyncContext(
                group,
                lambda: self._step.batch.weight,
                self._on_wait,
                self._on_lost,
                lambda: self._step.is_void,
                self._is_over,
                "session.gather",
            )
        return self._context


class Gather(torch.autograd.Function):
    """This worker's rows in, the rows of all workers out, in the order of the batch."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, context: SyncContext, group: Group, batch: Batch, part: float
    ) -> Tensor:
        ctx.context, ctx.group, ctx.batch, ctx.part = context, group, batch, part
        ctx.num_rows = len(rows)
        return summed_wide(place(rows, batch), lambda whole: context.sum(whole, group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        summed = ctx.context.sum(grad * ctx.part, ctx.group)
        batch: Batch = ctx.batch
        own = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        if batch.samples and ctx.part:  # a stand-in row counts for nothing
            own[: batch.samples] = summed[batch.begin : batch.begin + batch.samples] / ctx.part
        return own, None, None, None, None


def place(rows: Tensor, batch: Batch) -> Tensor:
    """This worker's rows where they belong among those of all workers, and zeros elsewhere."""
    if len(rows) != max(1, batch.samples):
        raise EvenstepError(
            f"session.gather got {len(rows)} rows for the {max(1, batch.samples)} samples of this "
            "worker's batch. Give one row for each sample, in the order of the batch; gather "
            "several views one by one."
        )
    whole = rows.new_zeros(batch.total, *rows.shape[1:])
    whole[batch.begin : batch.begin + batch.samples] = rows[: batch.samples]
    return whole
