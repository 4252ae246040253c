"""The BatchNorm layers of a model: synchronised over all workers, or local and averaged."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from evenstep.train.comm.group import Group, GroupGoneError
from evenstep.train.reduce import batch_norm
from evenstep.train.step import Step

log = logging.getLogger("evenstep")


class NormLayers:
    """Keeps running statistics equal on all workers, synchronised or averaged."""

    def __init__(self, model: torch.nn.Module, *, sync: bool) -> None:
        self._model = model
        has_any = bool(batch_norm.local_layers(model))
        self._sync, self._local = has_any and sync, has_any and not sync
        self._warned = False

    @property
    def needs_group(self) -> bool:
        """Whether the layers reduce over a group of their own.

        On the gradients' group, a layer's sums and the buckets' could start in different orders.
        """
        return self._sync

    def connect(
        self,
        group: Group,
        step: Step,
        on_wait: Callable[[float], None],
        on_lost: Callable[[GroupGoneError], None] | None,
    ) -> None:
        """Synchronise the layers over a generation's group."""
        batch_norm.synchronise(
            self._model, group, lambda: step.batch.weight, on_wait, on_lost, lambda: step.is_void
        )

    def warn_if_local(self, rank: int, world: int) -> None:
        """Warn once, on the leader, when local statistics begin to depend on the shares."""
        if not self._local or world == 1 or self._warned:
            return
        self._warned = True  # on all ranks: a later leader does not repeat it
        if rank == 0:
            log.warning("%s", batch_norm.local_stats_warning(batch_norm.local_layers(self._model)))

    def average(
        self, all_reduce: Callable[[torch.Tensor], torch.Tensor], world: int, share: float
    ) -> None:
        """Average local running statistics over all workers, weighted by their shares."""
        if self._local and world > 1:
            batch_norm.average_buffers(self._model, all_reduce, share)

    def release(self) -> None:
        """Make synchronised layers plain BatchNorm again."""
        batch_norm.disconnect(self._model)
