"""Gradients within a host: FSDP's reduce-scatter, weighted by the samples of each process.

FSDP takes the mean over processes, which is the mean over samples only if all have as many. Here
each process's gradient is multiplied by its part of the host's samples, and summed; the result is
the host's mean gradient, which the reducer weighs by the host's share and sums over hosts. FSDP
calls hooks on a parameter when its shard is reduced, so the reducer needs no hook of FSDP's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn

from evenstep.train.comm.local_shards import fsdp_modules
from evenstep.train.step import Step


class WeightedReduceScatter:
    """FSDP's reduce-scatter, weighted: the mean over a host's samples, however they are cut."""

    def __init__(self, step: Step, size: int) -> None:
        self._step, self._size = step, size
        self.is_released = False  # then FSDP's own applies: the mean over processes

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for FSDP."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> distributed.Work | None:
        """Reduce and scatter one group of parameters."""
        weight = 1 / self._size if self.is_released else self._step.batch.part
        if weight:
            input_tensor.mul_(weight)
        else:
            input_tensor.zero_()  # not a product: a stand-in's gradient may be NaN
        work: distributed.Work | None = distributed.reduce_scatter_single(
            output_tensor, input_tensor, distributed.ReduceOp.SUM, group, async_op
        )
        return work


def weigh_gradients(model: nn.Module, step: Step, size: int) -> Callable[[], None]:
    """Weight the gradients of a host's processes by samples. Returns a function that undoes it."""
    comm = WeightedReduceScatter(step, size)
    for module in fsdp_modules(model):
        module.set_custom_reduce_scatter(comm)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    def release() -> None:
        comm.is_released = True

    return release
