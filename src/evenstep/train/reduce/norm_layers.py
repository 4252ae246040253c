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
        self.is_any = bool(batch_norm.local_layers(model))
        self._sync, self._local = self.is_any and sync, self.is_any and not sync
        self._warned = False

    def connect(
        self,
        control: Group,
        make: Callable[[str], Group],
        step: Step,
        on_wait: Callable[[float], None],
        on_lost: Callable[[GroupGoneError], None] | None,
    ) -> None:
        """Begin a generation: synchronise the layers, or warn once that they are not.

        They are synchronised over a group of their own: on the gradients' group, a layer's sums and
        the buckets' could start in different orders.
        """
        if self._sync:
            batch_norm.synchronise(
                self._model,
                make("norm"),
                lambda: step.batch.weight,
                on_wait,
                on_lost,
                lambda: step.is_void,
            )
        elif self._local and control.world > 1 and not self._warned:
            self._warned = True  # on all ranks: a later leader does not repeat it
            if control.rank == 0:
                layers = batch_norm.local_layers(self._model)
                log.warning("%s", batch_norm.local_stats_warning(layers))

    def average(
        self, all_reduce: Callable[[torch.Tensor], torch.Tensor], world: int, share: float
    ) -> None:
        """Average local running statistics over all workers, weighted by their shares."""
        if self._local and world > 1:
            batch_norm.average_buffers(self._model, all_reduce, share)

    def release(self) -> None:
        """Make synchronised layers plain BatchNorm again."""
        batch_norm.disconnect(self._model)
