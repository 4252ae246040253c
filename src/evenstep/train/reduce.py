"""The share-weighted mean of gradients over the group, bucket by bucket, while backward runs.

Each worker's gradient is the mean over its own samples. It is multiplied by the worker's weight
over the total and summed, so the result is the gradient of the union of all samples. Reducing is
linear and the weights add up to one: gradients that are equal everywhere already, as when they are
accumulated over several backward passes, come out as they went in.

Buckets are cut once, from the parameters in reverse order, and reduced strictly in that order: the
layout is the same on every rank from the first step on, whoever joins when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable
from torch.distributed.distributed_c10d import Work

from evenstep.train.group import Group

FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first reduction starts early
BUCKET_BYTES = 25 << 20


class Bucket:
    """A flat buffer and the parameters whose gradients it carries."""

    def __init__(self, params: Sequence[torch.nn.Parameter], device: torch.device) -> None:
        self.params = list(params)
        numel = sum(p.numel() for p in self.params)
        # Where the group can reduce it: on the host, for gradients of a GPU beside other devices.
        self.flat = torch.zeros(numel, dtype=self.params[0].dtype, device=device)
        pieces = torch.split(self.flat, [p.numel() for p in self.params])
        self.views = [piece.view_as(p) for piece, p in zip(pieces, self.params, strict=True)]
        self.missing = len(self.params)
        self.work: Work | None = None

    def fill(self, weight: float) -> None:
        """The weighted gradients into the buffer; no gradient, or no weight, is zero."""
        if weight == 0:
            self.flat.zero_()  # not a product: what nobody counts may be NaN
            return
        here = [(v, p.grad) for v, p in zip(self.views, self.params, strict=True)]
        for view, grad in here:
            if grad is None:
                view.zero_()
        pairs = [(v, g) for v, g in here if g is not None]
        if pairs:
            torch._foreach_copy_([v for v, _ in pairs], [g for _, g in pairs])
            self.flat.mul_(weight)

    def empty(self, scale: float, used: Sequence[bool]) -> None:
        """The reduced gradients out of the buffer; none for a parameter that nobody used."""
        if scale != 1.0:
            self.flat.mul_(scale)
        grads, views = [], []
        for param, view, anybody in zip(self.params, self.views, used, strict=True):
            if not anybody:
                param.grad = None
                continue
            if param.grad is None:
                param.grad = torch.empty_like(param)
            grads.append(param.grad)
            views.append(view)
        if grads:
            torch._foreach_copy_(grads, views)


class Reducer:
    """Reduces the gradients of one model at the end of every backward pass.

    `on_ready` is called when the last local gradient is on its way, with the parameters that have
    one; `on_reduced` when all sums are there. It answers with a factor for the gradients and with
    the parameters that any worker used.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        group: Group,
        *,
        on_ready: Callable[[list[bool]], None],
        on_reduced: Callable[[], tuple[float, list[bool]]],
    ) -> None:
        self.group = group
        self.weight = 1.0 / group.world  # of this worker's mean, of 1 over all workers
        self._on_ready, self._on_reduced = on_ready, on_reduced
        self.after: Callable[[], None] | None = None  # called when gradients are in place
        # Alone there is nobody to reduce with, and gradients stay untouched where they are.
        self.buckets = [Bucket(ps, group.device) for ps in cut(params)] if group.world > 1 else []
        self._bucket_of = {p: b for b in self.buckets for p in b.params}
        self._next = 0  # the bucket to be reduced next
        self._armed = False
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(self._on_grad) for p in params if p.requires_grad
        ]

    def close(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        for bucket in self.buckets:
            bucket.work = None

    def _on_grad(self, param: torch.Tensor) -> None:
        if not self._armed:
            self._armed = True
            Variable._execution_engine.queue_callback(self._finish)
        bucket = self._bucket_of.get(param)  # type: ignore[call-overload]
        if bucket is not None:
            bucket.missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing <= 0:
            self._start(self.buckets[self._next])

    def _start(self, bucket: Bucket) -> None:
        self._next += 1
        bucket.fill(self.weight)
        bucket.work = self.group.sum_async(bucket.flat)
        if self._next == len(self.buckets):
            self._on_ready(self._used())

    def _used(self) -> list[bool]:
        """Which parameters have a gradient here that counts, in the order of the buckets."""
        return [p.grad is not None and self.weight > 0 for b in self.buckets for p in b.params]

    def _finish(self) -> None:
        """The end of backward: parameters without a gradient count as zero; wait for the sums."""
        while self._next < len(self.buckets):
            self._start(self.buckets[self._next])
        if not self.buckets:
            self._on_ready([])
        for bucket in self.buckets:
            self.group.wait(bucket.work)
        scale, used = self._on_reduced()
        for bucket in self.buckets:
            num = len(bucket.params)
            bucket.empty(scale, used[:num])
            bucket.missing, bucket.work, used = num, None, used[num:]
        self._next, self._armed = 0, False
        if self.after is not None:
            self.after()


def cut(params: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters in reverse order, which is about that of their gradients, in buckets of a size.

    A bucket holds one dtype on one device. The cut depends on shapes alone.
    """
    buckets: list[list[torch.nn.Parameter]] = []
    room, kind = 0, None
    for param in reversed([p for p in params if p.requires_grad]):
        size = param.numel() * param.element_size()
        if size > room or kind != (param.dtype, param.device):
            room = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
            kind = (param.dtype, param.device)
            buckets.append([])
        buckets[-1].append(param)
        room -= size
    return buckets
