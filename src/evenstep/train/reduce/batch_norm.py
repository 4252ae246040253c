"""Batch normalisation over uneven workers: synchronised, or local and averaged by share.

With `SyncNorm`, outputs, gradients and running statistics equal those of one process that has all
workers' samples. It costs one all-reduce forward and one backward, on a group of their own. On the
gradients' group they would queue behind whole buckets; and a worker that lacks a gradient starts
its buckets later than the others, so all-reduces of layers and of buckets would be mixed up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from evenstep.errors import ConfigError, EvenstepError
from evenstep.train.comm.group import Group, GroupGoneError

CONVERTIBLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(slots=True)
class SyncContext:
    """Connects the BatchNorm layers of a model and its copies to the process group.

    The group is replaced when the roster changes, and None once the session is closed.
    """

    group: Group | None
    weight_of: Callable[[], float]  # the weight of this worker's mean loss in this step
    on_wait: Callable[[float], None]  # called with the seconds that each all-reduce took
    on_lost: Callable[[GroupGoneError], None] | None = None  # makes the step void; None: raise
    is_void: Callable[[], bool] = lambda: False
    is_over: Callable[[], bool] = lambda: False  # the session is closed
    what: str = "a synchronised BatchNorm"  # is summed over
    # Excluded from compiled graphs. Not at import time: the compiler takes a second to import.
    normalise: Callable[[SyncNorm, Tensor, SyncContext, Group], Tensor] = field(
        default_factory=lambda: torch.compiler.disable(_normalise)
    )

    def sum(self, values: Tensor, group: Group) -> Tensor:
        """All-reduce over the group, staged through the group's device if that is another one."""
        if self.group is None or self.is_over():
            raise EvenstepError(
                f"a backward pass through {self.what} after the session was closed: the other "
                "workers do not take part any more. Call backward before session.close()."
            )
        if group.is_closed or self.is_void():
            return _void_sums(values)
        staged = values.to(group.device)  # blocks on this worker's own GPU only
        began_s = time.perf_counter()
        try:
            summed = group.sum(staged).to(values.device)
        except GroupGoneError as e:
            if self.on_lost is None:
                raise
            self.on_lost(e)
            return _void_sums(values)
        if group.device.type == "cpu":  # else the wait happens on the GPU
            self.on_wait(time.perf_counter() - began_s)
        return summed

    def __deepcopy__(self, memo: Any) -> SyncContext:
        return self  # a copy of the model is trained by the same workers

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a saved model has no group: plain BatchNorm once loaded


class SyncNorm(_BatchNorm):
    """BatchNorm that in training normalises by the statistics of all workers' samples together.

    A worker with weight zero has a stand-in batch, which is normalised but does not count. The
    layer is plain BatchNorm in evaluation, with a single worker, after the session, and once saved
    and loaded; its `state_dict` always is.
    """

    context: SyncContext | None = None

    @property
    def group(self) -> Group | None:
        """The group to synchronise over; None: this worker's samples only."""
        return None if self.context is None else self.context.group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of 2 dimensions or more, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a batch. In training, all workers call their layers in the same order."""
        context, group = self.context, self.group
        if not self.training or context is None or group is None or group.world == 1:
            return super().forward(input)
        self._check_input_dim(input)
        return context.normalise(self, input, context, group)

    @torch.no_grad()
    def update_running_stats(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Update the running statistics by those of a step, as plain BatchNorm would."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = var * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.mul_(1 - rate).add_(new.to(running), alpha=rate)


def _void_sums(values: Tensor) -> Tensor:
    """Any finite statistics that the layers can compute with: the step does not count."""
    return torch.full_like(values, 2.0)


def _normalise(layer: SyncNorm, x: Tensor, context: SyncContext, group: Group) -> Tensor:
    weight = context.weight_of()
    mean, var, count = _global_stats(x, weight > 0, context, group)
    if layer.track_running_stats:
        layer.update_running_stats(mean, var, count)
    out: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        x, layer.weight, layer.bias, mean, var, count, weight, layer.eps, context, group
    )
    return out


@torch.no_grad()
def _global_stats(
    x: Tensor, counts: bool, context: SyncContext, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and count per channel of all workers' inputs, in double precision.

    Each worker computes its own variance around its own mean, in the precision of its input. Only
    means are squared here, for which double precision is enough.
    """
    channels = x.size(1)
    sums = x.new_zeros(2 * channels + 1, dtype=torch.float64)
    if counts:  # not multiplied by zero: a stand-in may be NaN
        # Four to ten times as fast on a CPU as torch.var_mean over the same dimensions.
        own_mean, own_var = torch.batch_norm_update_stats(_upcast(x), None, None, 0.0)
        own_mean, own_var = own_mean.double(), own_var.double()
        torch.cat([own_mean, own_var + own_mean**2], out=sums[1:])
        sums[0] = 1.0
        sums *= x.numel() // channels
    sums = context.sum(sums, group)
    count = sums[0]
    # Not on CUDA: reading the count would block the host.
    if group.device.type == "cpu" and count < 2:
        _raise_too_few(int(count))
    mean, square = (sums[1:] / count).chunk(2)
    return mean, (square - mean**2).clamp_(min=0), count


def _raise_too_few(count: int) -> NoReturn:
    if count == 0:
        raise EvenstepError(
            "a synchronised BatchNorm was called in training mode while no worker had a batch. "
            "Call it inside the loop over the loader, or call model.eval() first."
        )
    raise ValueError(
        "expected more than 1 value per channel when training, got 1 over all workers. "
        "Use a larger batch, or pass drop_last=True to the loader."
    )


def _upcast(x: Tensor) -> Tensor:
    """At least single precision: half precision is too coarse for sums."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Normalise(torch.autograd.Function):
    """Normalise by statistics that depend on the inputs of all workers.

    Let worker i have mean loss l_i with weight w_i; the loss of all samples is L = sum w_i l_i / W.
    Its gradient for an input x of worker i, with n inputs per channel and x̂ normalised, is

        dL/dx = (gamma / sigma) (dL/dy - (1/n) sum dL/dy - (x̂/n) sum (dL/dy x̂))

    where dL/dy = (w_j / W) dl_j/dy on worker j, and the sums run over all workers. The reducer
    multiplies the gradients of worker i by w_i / W, so `backward` returns dL/dx W / w_i. Then W
    cancels, and each worker needs only its own weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        weight: float,
        eps: float,
        context: SyncContext,
        group: Group,
    ) -> Tensor:
        wide = _upcast(x)
        mean, var = mean.to(wide), var.to(wide)
        ctx.save_for_backward(x, gamma, mean, var, count)
        ctx.weight, ctx.eps, ctx.context, ctx.group = weight, eps, context, group
        scale, shift = (None if p is None else p.to(wide) for p in (gamma, beta))
        return batch_norm(wide, mean, var, scale, shift, False, 0.0, eps).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, mean, var, count = ctx.saved_tensors
        wide, eps = _upcast(x), ctx.eps
        scale = torch.ones_like(mean) if gamma is None else gamma.to(wide)
        mask = [ctx.needs_input_grad[0], True, True]
        # With the statistics held constant: (gamma/sigma) dl/dy, sum (dl/dy x̂), sum dl/dy.
        dx, dgamma, dbeta = torch.ops.aten.native_batch_norm_backward(
            grads[0].to(wide), wide, scale, mean, var, None, None, False, eps, mask
        )
        if ctx.needs_input_grad[0]:
            own = torch.cat([dgamma, dbeta]).double()
            weighted = own * ctx.weight if ctx.weight > 0 else torch.zeros_like(own)
            sums = ctx.context.sum(weighted, ctx.group)
            if ctx.weight > 0:
                factor = -scale * torch.rsqrt(var + eps)
                by_var, by_mean = (sums / (count * ctx.weight)).to(wide).chunk(2)
                dx += batch_norm(wide, mean, var, factor * by_var, factor * by_mean, eps=eps)
            else:
                dx.zero_()
        rows = zip((dx, dgamma, dbeta), (x, gamma, gamma), ctx.needs_input_grad[:3], strict=True)
        return *(g.to(t.dtype) if needed else None for g, t, needed in rows), *[None] * 7


def synchronise(
    model: nn.Module,
    group: Group,
    weight_of: Callable[[], float],
    on_wait: Callable[[float], None] = lambda seconds: None,
    on_lost: Callable[[GroupGoneError], None] | None = None,
    is_void: Callable[[], bool] = lambda: False,
) -> nn.Module:
    """Synchronise every BatchNorm of a model over a group that nothing else uses.

    Returns the same model: modules, parameters and buffers stay the same objects. Another call, for
    a new generation, moves its layers and those of its copies to the new group.
    """
    for name in local_layers(model):
        kind = type(model.get_submodule(name))
        if kind not in CONVERTIBLE and kind is not SyncNorm:
            raise ConfigError(
                "sync_batchnorm",
                f"{name or 'the model'} is a {kind.__name__}, which may override forward; "
                "use a BatchNorm from torch.nn instead, or leave out sync_batchnorm",
            )
    for context in _contexts(model):
        if context.group is not None:
            context.group = group
            return model
    context = SyncContext(group, weight_of, on_wait, on_lost, is_void)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            # Change the class, not the object: hooks on it and references to it stay valid.
            module.__class__ = SyncNorm
            cast(SyncNorm, module).context = context
    return model


def disconnect(model: nn.Module) -> None:
    """Make the synchronised layers of a model, and of its copies, plain BatchNorm again."""
    for context in _contexts(model):
        context.group = None


def _contexts(model: nn.Module) -> list[SyncContext]:
    layers = [m for m in model.modules() if isinstance(m, SyncNorm)]
    return [layer.context for layer in layers if layer.context is not None]


def local_layers(model: nn.Module) -> list[str]:
    """Names of the layers that normalise by the statistics of their own worker's batch."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and not (isinstance(module, SyncNorm) and module.group is not None)
    ]


def local_stats_warning(names: Sequence[str]) -> str:
    """The warning about layers with local statistics."""
    some = ", ".join(name or "the model" for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"BatchNorm in {some}{more} normalises by the statistics of each worker's own share: the "
        "step differs from one on the whole batch, small shares make it noisy, and a share of one "
        "sample may fail. For statistics over all workers use "
        "session.prepare(model, ..., sync_batchnorm=True); to avoid small shares use "
        "evenstep.join(min_share=8)."
    )


@torch.no_grad()
def average_buffers(model: nn.Module, reduce: Callable[[Tensor], Tensor], weight: float) -> None:
    """Average the running means and variances of local layers over all workers, by weight.

    All workers call it at the same point between steps, before the model is evaluated or saved. If
    all weights are zero, buffers stay as they are.
    """
    buffers = [
        buffer
        for name in local_layers(model)
        for key, buffer in model.get_submodule(name).named_buffers(recurse=False)
        if key in ("running_mean", "running_var")
    ]
    if not buffers:
        return
    flat = torch.zeros(1 + sum(b.numel() for b in buffers), dtype=torch.float64)
    if weight > 0:
        flat[0] = weight
        for piece, buffer in zip(_split(flat, buffers), buffers, strict=True):
            piece.copy_(buffer.flatten()).mul_(weight)
    flat = reduce(flat)
    if flat[0] > 0:
        for piece, buffer in zip(_split(flat, buffers), buffers, strict=True):
            buffer.copy_((piece / flat[0]).view_as(buffer))


def _split(flat: Tensor, buffers: Sequence[Tensor]) -> Sequence[Tensor]:
    pieces: Sequence[Tensor] = flat[1:].split([b.numel() for b in buffers])
    return pieces
