"""The share-weighted mean of gradients over the group, bucket by bucket, while backward runs.

Each worker's gradient is the mean over its own samples. It is multiplied by the worker's weight
over the total and summed, so the result is the gradient of the union of all samples. Reducing is
linear and the weights add up to one: gradients that are equal everywhere already, as when they are
accumulated over several backward passes, come out as they went in.

Buckets are cut once, from the parameters in reverse order, and reduced strictly in that order: the
layout is the same on every rank from the first step on, whoever joins when.

The pulse travels at the end of the last bucket, so that it costs no sum of its own; where a bucket
cannot hold its numbers, in half precision or on a GPU, it goes beside it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable
from torch.distributed.distributed_c10d import Work

from evenstep.errors import EvenstepError
from evenstep.train.comm.group import Group, GroupGoneError, SupersededError, await_closed
from evenstep.train.reduce.early_abort import put_gates

FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first reduction starts early
BUCKET_BYTES = 25 << 20
GONE_S = 0.2  # for an abandoned group to be gone: its peers have let it go too, but the lost one
EXACT = (torch.float32, torch.float64)  # these hold the numbers of a pulse


class Bucket:
    """A flat buffer and the parameters whose gradients it carries, with room for some more."""

    def __init__(
        self, params: Sequence[torch.nn.Parameter], device: torch.device, room: int = 0
    ) -> None:
        self.params = list(params)
        sizes, dtype = [p.numel() for p in self.params], self.params[0].dtype
        self._num = sum(sizes) * (2 if dtype.is_complex else 1)  # a complex number is summed as two
        # Where the group can reduce it: on the host, for gradients of a GPU beside other devices.
        # Some room more, for when there are more workers. Nothing is read before it is written.
        self._all = torch.empty(self._num + 4 * room, dtype=_real(dtype), device=device)
        gradients = self._all[: self._num].view(dtype)
        self.views = list(map(_like, gradients.split(sizes), self.params))
        self.filled: set[int] = set()  # places of the parameters whose gradients are in
        self.work: Work | None = None
        self._lent_to: Group | None = None  # whose sum may still write to it
        self.fits(device, room)

    def fits(self, device: torch.device, room: int) -> bool:
        """Make so much room behind the gradients, in a buffer that nobody else writes to."""
        if self.is_written_to or self._all.device != device or self._num + room > len(self._all):
            return False
        self._lent_to = None
        self.flat = self._all[: self._num + room]
        self.rest = self.flat[self._num :]
        self.filled.clear()
        return True

    @property
    def is_written_to(self) -> bool:
        """Whether an abandoned sum may still write to it."""
        return self._lent_to is not None and not self._lent_to.is_gone

    def lend(self, group: Group) -> None:
        """Start summing it up."""
        self._lent_to = group
        self.work = group.sum_async(self.flat)

    def fill(self, place: int, weight: float) -> None:
        """A parameter's weighted gradient into the buffer; no gradient, or no weight, is zero."""
        view, param = self.views[place], self.params[place]
        grad = param.grad
        if grad is None or weight == 0:
            view.zero_()  # not a product: what nobody counts may be NaN
        elif grad.device == view.device:
            torch.mul(grad, weight, out=view)
        else:
            view.copy_(grad).mul_(weight)
        if grad is not None and grad.device == view.device:
            param.grad = view  # the one that autograd made goes now, not with all others at the end
        self.filled.add(place)  # only now: another device's thread may be about to start the sum

    def fill_up(self, weight: float) -> None:
        """The parameters that this pass did not reach, with what earlier ones left them."""
        for place in range(len(self.params)):
            if place not in self.filled:
                self.fill(place, weight)

    def squared_norm(self) -> float:
        """Of all gradients in the buffer."""
        gradients = self.flat[: self._num]
        return float(torch.dot(gradients, gradients))

    def empty(self, scale: float, used: Sequence[bool]) -> None:
        """The reduced gradients become the parameters'; none where nobody used a parameter."""
        if scale != 1.0:
            self.flat.mul_(scale)
        for param, view, anybody in zip(self.params, self.views, used, strict=True):
            if not anybody:
                param.grad = None
            elif param.device == view.device:
                param.grad = view  # no copy: the buffer is the gradient until the next pass
            else:
                param.grad = view.to(param.device)
        self.filled.clear()
        self.work, self._lent_to = None, None


def _real(dtype: torch.dtype) -> torch.dtype:
    """What the parts of a number are: itself, unless it is complex."""
    return dtype.to_real() if dtype.is_complex else dtype


def _like(piece: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
    """A part of the buffer in the shape of a parameter, and in its order in memory."""
    dense = torch.empty_like(param, device="meta").stride() == param.stride()  # no gaps, no overlap
    return piece.as_strided(param.shape, param.stride()) if dense else piece.view(param.shape)


class Pass:
    """One backward pass. It lives as long as autograd keeps it, and is called at its end.

    A pass that fails is dropped without being called: that is how the next one knows of it.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end

    def __call__(self) -> None:
        self._at_end()


class Reducer:
    """Reduces the gradients of one model at the end of every backward pass.

    `on_ready` is called when the last local gradient is there, with the parameters that have one,
    and answers with the pulse, `pulse` numbers and a flag for each parameter; `on_reduced` when all
    sums are there, with that of the pulse. It answers with a factor for the gradients and with the
    parameters that any worker used. A pulse that no bucket can hold is summed over `control`.
    `on_gone` is told that the group is gone, and the gradients are then worth nothing; without it,
    that is raised from `backward`.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        *,
        on_ready: Callable[[list[bool]], torch.Tensor],
        on_reduced: Callable[[torch.Tensor], tuple[float, list[bool]]],
        on_gone: Callable[[GroupGoneError], None] | None = None,
    ) -> None:
        self._params = [p for p in params if p.requires_grad]
        self._known = {id(p) for p in self._params}
        self.weight = 1.0  # of this worker's mean, of 1 over all workers
        self.measures = False  # squared norms, for whoever wants to know the gradients' noise
        self.own_squared_norm = self.squared_norm = 0.0  # of this worker's mean, and of the whole's
        self._on_ready, self._on_reduced, self._on_gone = on_ready, on_reduced, on_gone
        self.after: Callable[[], None] | None = None  # called when gradients are in place
        self.buckets: list[Bucket] = []
        self._place_of: dict[torch.Tensor, tuple[Bucket, int]] = {}
        self._pulse = torch.zeros(0)
        self._pulse_work: Work | None = None  # if it goes by itself
        self._next = 0  # the bucket to be reduced next
        self._lock = threading.Lock()  # for what is known of the pass at hand
        self._pass: weakref.ref[Pass] | None = None  # that is not over, or that failed
        self.void = False  # the group is gone: nothing is reduced until there is another
        self._useless: Callable[[], str] | None = None
        self._given_up = ""  # why the pass at hand leads to nothing
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(self._on_grad) for p in self._params
        ]

    def give_up_if(self, useless: Callable[[], str], model: torch.nn.Module) -> None:
        """Break off a backward pass once `useless` says why it leads to nothing."""
        self._useless = useless
        self._handles += put_gates(model, self._gives_up, BUCKET_BYTES)

    def _gives_up(self) -> bool:
        # Only where gradients have begun to come in: torch.autograd.grad, which comes through a
        # gate too, must get what it asks for.
        if self._pass is None or self._pass() is None:
            return False
        if not (self.void or self._given_up) and self.buckets and self._useless is not None:
            self._given_up = self._useless()
        return self.void or bool(self._given_up)

    def regroup(self, group: Group, control: Group, pulse: int) -> None:
        """Reduce over another group. Buffers to which an abandoned sum may write are made anew."""
        self.group, self._control = group, control
        before, self.buckets, self._next, self.void = self.buckets, [], 0, False
        self._pass, self._given_up = None, ""
        # Alone there is nobody to reduce with, and gradients stay untouched where they are.
        if group.world > 1:
            if any(bucket.is_written_to for bucket in before):
                await_closed(GONE_S)
            parts = cut(self._params)
            last = parts[-1][0]
            holds = _real(last.dtype) in EXACT and group.device.type == "cpu"
            room = pulse + len(self._params) if holds else 0
            for i, params in enumerate(parts):
                behind = room if i == len(parts) - 1 else 0
                old = before[i] if before else None
                if old is None or not old.fits(group.device, behind):
                    old = Bucket(params, group.device, behind)
                self.buckets.append(old)
        self._place_of = {p: (b, i) for b in self.buckets for i, p in enumerate(b.params)}

    def warm_up(self, pulse: int) -> None:
        """Make the buffers while nobody waits: a first touch of so much memory takes its time."""
        if all(p.device.type == "cpu" for p in self._params):
            parts = cut(self._params)
            rooms = [0] * (len(parts) - 1) + [pulse + len(self._params)]
            self.buckets = [
                Bucket(params, params[0].device, room)
                for params, room in zip(parts, rooms, strict=True)
            ]
            for bucket in self.buckets:
                bucket.flat.zero_()

    def let_go(self) -> None:
        """Hold on to nothing of the group."""
        for bucket in self.buckets:
            bucket.work = None
        self._pulse_work = None

    def close(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        self.let_go()

    def check_known(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        """Refuse to step by a gradient that is not reduced: this worker's own, also if alone."""
        known = self._known
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in known and param.grad is not None:
                    raise EvenstepError(_of_stranger(param, model))

    def _on_grad(self, param: torch.Tensor) -> None:
        # Autograd has a thread for each device. Gradients are copied outside of the lock.
        with self._lock:
            if self._pass is None or self._pass() is None:
                self._begin_pass()
        if self.void or self._given_up:
            return
        _check_gradient(param)
        if not self.buckets:
            return
        bucket, place = self._place_of[param]
        if place in bucket.filled:
            raise EvenstepError(
                f"a parameter of shape {tuple(param.shape)} got its gradient twice in one backward "
                "pass, so it cannot be reduced while the pass runs. Checkpointing does that: "
                "call it with use_reentrant=False."
            )
        bucket.fill(place, self.weight)
        with self._lock:
            # Another device's thread may have found the group gone meanwhile.
            while not self.void and self._next < len(self.buckets):
                bucket = self.buckets[self._next]
                if len(bucket.filled) < len(bucket.params):
                    break
                self._start(bucket)

    def _begin_pass(self) -> None:
        if self._pass is not None and not self.void:  # the one before failed, and was caught
            if self._next:
                raise EvenstepError(
                    "an earlier backward pass of this batch failed after part of its gradients was "
                    "sent to the other workers, so it cannot be repeated. If memory ran out, give "
                    "this worker a limit: evenstep.join(cap=...)."
                )
            for bucket in self.buckets:
                bucket.filled.clear()
        begun = Pass(self._finish)
        self._pass = weakref.ref(begun)
        Variable._execution_engine.queue_callback(begun)

    def _start(self, bucket: Bucket) -> None:
        if self.measures and self.weight > 0:
            before = self.own_squared_norm if self._next else 0.0
            self.own_squared_norm = before + bucket.squared_norm() / self.weight**2
        self._next += 1
        if self._next == len(self.buckets):
            self._pulse = self._on_ready(self._used())
            if len(bucket.rest):
                bucket.rest.copy_(self._pulse)
                self._pulse = bucket.rest
            else:
                self._pulse_work = self._control.sum_async(self._pulse)
        bucket.lend(self.group)

    def _used(self) -> list[bool]:
        """Which parameters have a gradient here that counts, in the order of the buckets."""
        return [p.grad is not None and self.weight > 0 for b in self.buckets for p in b.params]

    def _finish(self) -> None:
        """The end of backward: parameters without a gradient count as zero; wait for the sums."""
        self._pass = None
        if not self.void:
            try:
                self._reduce()
            except GroupGoneError as e:
                if self._on_gone is None:
                    raise
                self.void = True
                self._on_gone(e)
        if self.void:
            self._stand_in()
        if self.after is not None:
            self.after()

    def _stand_in(self) -> None:
        """Gradients that never came: the rest of the loop may look at them, void as they are."""
        for param, (bucket, place) in self._place_of.items():
            if param.grad is None:
                view = bucket.views[place]
                param.grad = view if view.device == param.device else torch.zeros_like(param)

    def _reduce(self) -> None:
        if self._given_up:
            raise SupersededError(self._given_up)
        for bucket in self.buckets[self._next :]:
            bucket.fill_up(self.weight)
            self._start(bucket)
        if not self.buckets:
            self._pulse = self._on_ready([])
        for bucket in self.buckets:
            self.group.wait(bucket.work)
        self._control.wait(self._pulse_work)
        self._pulse_work = None
        scale, used = self._on_reduced(self._pulse)
        if self.measures:
            self.squared_norm = scale**2 * sum(bucket.squared_norm() for bucket in self.buckets)
        for bucket in self.buckets:
            num = len(bucket.params)
            bucket.empty(scale, used[:num])
            used = used[num:]
        self._next = 0


def _of_stranger(param: torch.Tensor, model: torch.nn.Module) -> str:
    """What to tell of a parameter with a gradient that is not reduced."""
    name = next((f"{n}, " for n, p in model.named_parameters() if p is param), "")
    told = f"a parameter ({name}shape {tuple(param.shape)}) has a gradient of this worker alone: "
    if not name:
        return told + (
            "it is in the optimizer, but not in the model given to session.prepare. Give both in "
            "one: session.prepare(torch.nn.ModuleList([model, ...]), optimizer)."
        )
    return told + (
        "it was frozen, or not there, when session.prepare was called. Call prepare when all that "
        "will ever train is in the model and trainable; what is to rest meanwhile may be frozen "
        "right after, and unfrozen at any time."
    )


def _check_gradient(param: torch.Tensor) -> None:
    """Refuse what cannot be reduced, also where there is nobody to reduce with yet."""
    grad = param.grad
    assert grad is not None
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


def cut(params: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters in reverse order, which is about that of their gradients, in buckets of a size.

    A bucket holds one dtype on one device. The cut depends on shapes alone.
    """
    buckets: list[list[torch.nn.Parameter]] = []
    room, kind = 0, None
    for param in reversed(params):
        size = param.numel() * param.element_size()
        if size > room or kind != (param.dtype, param.device):
            room = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
            kind = (param.dtype, param.device)
            buckets.append([])
        buckets[-1].append(param)
        room -= size
    return buckets
