"""The share-weighted mean of gradients over the group, bucket by bucket, while backward runs.

Each worker's gradient is the mean over its own samples. It is multiplied by the worker's weight
over the total and summed, so the result is the gradient of the union of all samples. Reducing is
linear and the weights add up to one, so gradients that are equal on all workers already, as when
they are accumulated over several backward passes, stay as they are.

Buckets are cut once, from the parameters in reverse order, and reduced strictly in that order, so
their layout is the same on every rank from the first step on, joiners included.

The pulse travels at the end of the last bucket and costs no all-reduce of its own; where a bucket
cannot hold its numbers, in half precision or on a GPU, it has one beside it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable
from torch.distributed.distributed_c10d import Work

from evenstep.errors import EvenstepError
from evenstep.train.comm.group import Group, GroupGoneError, SupersededError
from evenstep.train.comm.host import ALONE, Host
from evenstep.train.comm.transfer import await_closed
from evenstep.train.reduce.bucket import BUCKET_BYTES, Bucket, holds_exactly, make_buckets
from evenstep.train.reduce.early_abort import register_abort_hooks
from evenstep.train.step import Step

STEP_AFTERWARDS = (
    "Gradients are the mean over all workers when backward() returns, and those of this worker "
    "alone before. Update parameters after it: without such hooks, optimizer.step() after "
    "backward()."
)
GONE_S = 0.2  # for an abandoned group to be destroyed: the other survivors close theirs too


class Pass:
    """One backward pass: queued with autograd, which calls it at the end of the pass.

    Autograd drops it without a call if the pass fails, and the next pass notices.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end

    def __call__(self) -> None:
        self._at_end()


class Reducer:
    """Reduces the gradients of one model at the end of every backward pass.

    `on_ready` is called when the last local gradient is computed, with a flag for each parameter
    that has one, this worker's own squared norm, and whether all are finite; it returns the pulse.
    `on_reduced` is called with the reduced pulse when all all-reduces are complete; it returns a
    factor for the gradients, and a flag for each parameter that any worker used, or raises
    GroupGoneError. `on_lost` is called then, and when the group fails: it makes the step void, or
    raises. In a void step nothing is reduced.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        step: Step,
        *,
        on_ready: Callable[[list[bool], float, bool], torch.Tensor],
        on_reduced: Callable[[torch.Tensor], tuple[float, list[bool]]],
        on_lost: Callable[[GroupGoneError], None],
        host: Host = ALONE,
    ) -> None:
        self._host = host
        self._params = [p for p in params if p.requires_grad]
        self.known = {id(p) for p in self._params}  # parameters whose gradients are reduced
        self._step, self._own_squared_norm = step, 0.0  # of this worker's mean gradient
        self._is_finite = True  # that gradient
        self._on_ready, self._on_reduced, self._on_lost = on_ready, on_reduced, on_lost
        self.after: Callable[[], None] | None = None  # called when gradients are in place
        self.buckets: list[Bucket] = []
        self._index_of: dict[torch.Tensor, tuple[Bucket, int]] = {}
        self._pulse = torch.zeros(0)
        self._pulse_work: Work | None = None  # if no bucket holds it
        self._next = 0  # index of the bucket to reduce next
        self._lock = threading.Lock()  # guards the state of the pass: autograd has several threads
        self._pass: weakref.ref[Pass] | None = None  # in progress, or failed
        self._superseded: Callable[[], str] | None = None
        self._given_up = ""  # why the pass at hand was broken off
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(self._on_grad) for p in self._params
        ]

    @property
    def _weight(self) -> float:
        """The weight of this worker's mean gradient; those of all workers add up to 1."""
        return self._step.batch.weight / self._step.batch.total

    def give_up_if(self, superseded: Callable[[], str], model: torch.nn.Module) -> None:
        """Break off backward passes once `superseded` says why their result is of no use."""
        self._superseded = superseded
        self._handles += register_abort_hooks(model, self._gives_up, BUCKET_BYTES)

    def _gives_up(self) -> bool:
        # Only once a parameter has its gradient: torch.autograd.grad, which runs the abort hooks
        # too, must return what it was asked for.
        if self._pass is None or self._pass() is None:
            return False
        is_void = self._step.is_void
        if not (is_void or self._given_up) and self.buckets and self._superseded is not None:
            self._given_up = self._superseded()
        return is_void or bool(self._given_up)

    def regroup(self, group: Group, control: Group, pulse: int) -> None:
        """Reduce over another group, with a pulse of `pulse` numbers beside the flags.

        Buffers to which an abandoned all-reduce may still write are replaced. A pulse that no
        bucket can hold is reduced over `control`.
        """
        self.group, self._control = group, control
        before, self.buckets, self._next = self.buckets, [], 0
        self._pass, self._given_up = None, ""
        # A single worker has nobody to reduce with: its gradients stay where they are.
        if group.world > 1:
            if any(bucket.is_written_to for bucket in before):
                await_closed(GONE_S)
            has_pulse = holds_exactly(self._params) and group.device.type == "cpu"
            num_extra = pulse + len(self._params) if has_pulse else 0
            self.buckets = make_buckets(self._params, group.device, num_extra, before)
        self._index_of = {p: (b, i) for b in self.buckets for i, p in enumerate(b.params)}

    def warm_up(self, pulse: int) -> None:
        """Allocate the buffers before anyone waits for them: first touch of memory is slow."""
        if all(p.device.type == "cpu" for p in self._params):
            num_extra = pulse + len(self._params)
            self.buckets = make_buckets(self._params, torch.device("cpu"), num_extra)
            for bucket in self.buckets:
                bucket.flat.zero_()

    def forget_operations(self) -> None:
        """Drop all references to the group's operations."""
        for bucket in self.buckets:
            bucket.work = None
        self._pulse_work = None

    def close(self) -> None:
        """Remove all hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self.forget_operations()

    def _on_grad(self, param: torch.Tensor) -> None:
        # Autograd has a thread per device: copy gradients outside of the lock.
        with self._lock:
            if self._pass is None or self._pass() is None:
                self._begin_pass()
        if self._step.is_void or self._given_up:
            return
        _check_gradient(param)
        if not self.buckets:
            return
        bucket, index = self._index_of[param]
        if param.dtype != bucket.views[index].dtype:
            raise EvenstepError(
                f"a parameter of shape {tuple(param.shape)} was {bucket.views[index].dtype} when "
                f"session.prepare was called, and is {param.dtype} now. Convert the model, by "
                "model.float() say, before its optimizer is made and before session.prepare."
            )
        if index in bucket.filled:
            raise EvenstepError(
                f"a parameter of shape {tuple(param.shape)} got its gradient twice in one backward "
                "pass, so it cannot be reduced while the pass runs. Reentrant activation "
                "checkpointing does that: use use_reentrant=False."
            )
        bucket.fill(index, self._weight)
        with self._lock:
            # Another device's thread may have lost the group in between.
            while not self._step.is_void and self._next < len(self.buckets):
                bucket = self.buckets[self._next]
                if len(bucket.filled) < len(bucket.params):
                    break
                self._start(bucket)

    def _begin_pass(self) -> None:
        if self._pass is not None and not self._step.is_void:  # it failed, and was caught
            if self._next:
                raise EvenstepError(
                    "an earlier backward pass of this batch failed after part of its gradients was "
                    "sent to the other workers, so it cannot be repeated. If memory ran out, give "
                    "this worker a limit: evenstep.join(cap=...)."
                )
            for bucket in self.buckets:
                bucket.filled.clear()
        new = Pass(self._finish)
        self._pass = weakref.ref(new)
        Variable._execution_engine.queue_callback(new)

    def _start(self, bucket: Bucket) -> None:
        if self._next == 0:
            self._own_squared_norm, self._is_finite = 0.0, True
        self._is_finite = self._is_finite and bucket.is_finite()
        if self._step.measures_noise and self._weight > 0:
            self._own_squared_norm += bucket.squared_norm() / self._weight**2
        self._next += 1
        if self._next == len(self.buckets):
            self._pulse = self._on_ready(
                self._used(), finite(self._own_squared_norm), self._is_finite
            )
            if len(bucket.extra):
                bucket.extra.copy_(self._pulse)
                self._pulse = bucket.extra
            else:
                self._pulse_work = self._control.sum_async(self._pulse)
        bucket.lent_to = self.group
        bucket.work = self.group.sum_async(bucket.flat)

    def _used(self) -> list[bool]:
        """A flag for each parameter with a gradient that counts, in the order of the buckets."""
        counts = self._weight > 0
        return [p.grad is not None and counts for b in self.buckets for p in b.params]

    def _finish(self) -> None:
        """The end of backward: complete the sums, unless a worker was lost."""
        self._pass = None
        self._step.num_passes += 1
        if not self._step.is_void:
            lost: GroupGoneError | None = None
            try:
                self._sum()
            except GroupGoneError as e:
                lost = e
            if (lost := self._host.agree(lost)) is not None:
                self._on_lost(lost)
            else:
                try:
                    self._hand_out()
                except GroupGoneError as e:  # on all ranks alike
                    self._on_lost(e)
        if self._step.is_void:
            self.fill_missing()
        if self.after is not None:
            self.after()

    def fill_missing(self) -> None:
        """Give every parameter some gradient: the rest of the loop's body may look at it."""
        for param, (bucket, index) in self._index_of.items():
            if param.grad is None:
                grad = bucket.grads[index]
                param.grad = grad if grad.device == param.device else torch.zeros_like(param)

    def _sum(self) -> None:
        """Reduce what is left, and wait for all all-reduces."""
        if self._given_up:
            raise SupersededError(self._given_up)
        for bucket in self.buckets[self._next :]:
            bucket.fill_up(self._weight)
            self._start(bucket)
        if not self.buckets:
            self._pulse = self._on_ready([], 0.0, True)
        for bucket in self.buckets:
            self.group.wait(bucket.work)
        self._control.wait(self._pulse_work)
        self._pulse_work = None

    def _hand_out(self) -> None:
        """Give the parameters their gradients."""
        self._host.from_first(self._pulse)
        scale, used = self._on_reduced(self._pulse)
        self._step.grad_squared_norm = 0.0
        if self._step.measures_noise:
            norm = sum(bucket.squared_norm() for bucket in self.buckets)
            self._step.grad_squared_norm = finite(scale**2 * norm)
        for bucket in self.buckets:
            num = len(bucket.params)
            bucket.hand_out(scale, used[:num])
            used = used[num:]
        self._next = 0


def finite(norm: float) -> float:
    """A norm to report: 0, not measured, if it is infinite or not a number."""
    return norm if math.isfinite(norm) else 0.0


def _check_gradient(param: torch.Tensor) -> None:
    """Refuse a gradient that cannot be reduced, even while this worker is alone."""
    grad = param.grad
    if grad is None:
        raise EvenstepError(
            f"a parameter of shape {tuple(param.shape)} has no gradient left when it is to be "
            f"reduced: a hook of the script has used it up inside of backward(). {STEP_AFTERWARDS}"
        )
    if grad.layout is not torch.strided:
        raise EvenstepError(
            f"a parameter of shape {tuple(param.shape)} got a sparse gradient, and only dense ones "
            "are reduced over workers. Make its layer with sparse=False."
        )
    if grad.requires_grad:
        raise EvenstepError(
            f"a parameter of shape {tuple(param.shape)} got a gradient with a graph of its own, "
            "which is lost when gradients are reduced over workers. Call backward without "
            "create_graph=True; torch.autograd.grad(loss, ..., create_graph=True) may go before it."
        )
