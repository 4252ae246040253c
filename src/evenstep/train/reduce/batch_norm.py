"""Batch normalisation over uneven workers: synchronised by count, or local and averaged by share.

With `SyncNorm` outputs, gradients and running statistics are those of one process with the union of
all shares. It takes one sum over the group forward and one backward. These want a group of their
own: on that of the gradients they would queue behind whole buckets, and a worker without a gradient
for some parameter starts its buckets later than the others, which would match sums that do not
belong together.
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

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(slots=True)
class Link:
    """Connects the BatchNorm layers of a model and its copies to the process group.

    The group is replaced when the roster changes, and None once the session is closed.
    """

    group: Group | None
    weight_of: Callable[[], float]  # what this worker's mean loss counts for in the step at hand
    on_wait: Callable[[float], None]  # told the seconds that each sum took
    on_lost: Callable[[GroupGoneError], None] | None = None  # makes the step void; else it raises
    is_void: Callable[[], bool] = lambda: False  # whether the step at hand does not count
    # Kept out of compiled graphs; only now, since the compiler takes a second to import.
    normalise: Callable[[SyncNorm, Tensor, Link, Group], Tensor] = field(
        default_factory=lambda: torch.compiler.disable(_normalise)
    )

    def sum(self, values: Tensor, group: Group) -> Tensor:
        """The sum over the group, staged through its device if it is another one."""
        if self.group is None:
            raise EvenstepError(
                "a backward pass through a synchronised BatchNorm after the session was closed: "
                "the other workers do not take part any more. Call backward before "
                "session.close()."
            )
        if group.is_closed or self.is_void():  # a worker was lost: the step does not count
            return torch.full_like(values, 2.0)
        here = values.to(group.device)  # from a card, this waits for its work: no peer's fault
        began_s = time.perf_counter()
        try:
            summed = group.sum(here).to(values.device)
        except GroupGoneError as e:
            if self.on_lost is None:
                raise
            self.on_lost(e)
            return torch.full_like(values, 2.0)  # anything finite: the step does not count
        if group.device.type == "cpu":  # a card's own waiting is not seen from the host
            self.on_wait(time.perf_counter() - began_s)
        return summed

    def __deepcopy__(self, memo: Any) -> Link:
        return self  # a copy of the model is trained by the same workers

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a saved model is tied to nobody: plain BatchNorm once loaded


class SyncNorm(_BatchNorm):
    """BatchNorm that in training normalises by the statistics of all workers' samples together.

    A worker whose weight is zero has a stand-in for a batch: it is normalised, and counts nothing.
    In evaluation, alone, after the session's end, or once saved and loaded this is plain BatchNorm;
    so is its `state_dict`.
    """

    link: Link | None = None

    @property
    def group(self) -> Group | None:
        """The workers whose samples are normalised together; None: this one's alone."""
        return None if self.link is None else self.link.group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of 2 dimensions or more, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a batch. In training, all workers do so in the same order."""
        link, group = self.link, self.group
        if not self.training or link is None or group is None or group.world == 1:
            return super().forward(input)
        self._check_input_dim(input)
        return link.normalise(self, input, link, group)

    @torch.no_grad()
    def track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Take a step's statistics into the running ones, as plain BatchNorm would."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = var * (count / (count - 1))
        for kept, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            kept.mul_(1 - rate).add_(new.to(kept), alpha=rate)


def _normalise(layer: SyncNorm, x: Tensor, link: Link, group: Group) -> Tensor:
    weight = link.weight_of()
    mean, var, count = _union(x, weight > 0, link, group)
    if layer.track_running_stats:
        layer.track(mean, var, count)
    normal: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        x, layer.weight, layer.bias, mean, var, count, weight, layer.eps, link, group
    )
    return normal


@torch.no_grad()
def _union(x: Tensor, counts: bool, link: Link, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and count per channel of all workers' inputs, in double precision.

    Each worker's own variance is taken from the deviations from its own mean, in its own precision:
    only means are squared here, and double precision holds those.
    """
    channels = x.size(1)
    sums = x.new_zeros(2 * channels + 1, dtype=torch.float64)
    if counts:  # not a product with zero: what nobody counts may be NaN
        # Four to ten times as fast on a CPU as torch.var_mean over the same dimensions.
        own_mean, own_var = torch.batch_norm_update_stats(_wide(x), None, None, 0.0)
        own_mean, own_var = own_mean.double(), own_var.double()
        torch.cat([own_mean, own_var + own_mean**2], out=sums[1:])
        sums[0] = 1.0
        sums *= x.numel() // channels
    sums = link.sum(sums, group)
    count = sums[0]
    # On a CUDA device the look at the count would make the host wait.
    if group.device.type == "cpu" and count < 2:
        _refuse(int(count))
    mean, square = (sums[1:] / count).chunk(2)
    return mean, (square - mean**2).clamp_(min=0), count


def _refuse(count: int) -> NoReturn:
    if count == 0:
        raise EvenstepError(
            "a synchronised BatchNorm was called in training mode while no worker had a batch. "
            "Call it within the loader's loop, or call model.eval() first."
        )
    raise ValueError(
        "expected more than 1 value per channel when training, got 1 over all workers. "
        "Raise the batch, or give the loader drop_last=True."
    )


def _wide(x: Tensor) -> Tensor:
    """Half precision is for keeping, not for sums."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Normalise(torch.autograd.Function):
    """Normalise by statistics that depend on the inputs of all workers.

    With the mean loss l_i of worker i counting for w_i, the union's loss is L = sum w_i l_i / W.
    Its gradient for an input of worker i, n inputs a channel, x̂ the normalised input, is

        dL/dx = (gamma / sigma) (dL/dy - (1/n) sum dL/dy - (x̂/n) sum (dL/dy x̂))

    where dL/dy = (w_j / W) dl_j/dy on each worker j, and the sums go over all of them. The reducer
    multiplies what worker i returns by w_i / W, so it returns dL/dx W / w_i: W cancels, and each
    worker need only know its own weight.
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
        link: Link,
        group: Group,
    ) -> Tensor:
        wide = _wide(x)
        mean, var = mean.to(wide), var.to(wide)
        ctx.save_for_backward(x, gamma, mean, var, count)
        ctx.weight, ctx.eps, ctx.link, ctx.group = weight, eps, link, group
        scale, shift = (None if p is None else p.to(wide) for p in (gamma, beta))
        return batch_norm(wide, mean, var, scale, shift, False, 0.0, eps).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, mean, var, count = ctx.saved_tensors
        wide, eps = _wide(x), ctx.eps
        scale = torch.ones_like(mean) if gamma is None else gamma.to(wide)
        mask = [ctx.needs_input_grad[0], True, True]
        # As if the statistics were constants: (gamma/sigma) dl/dy, sum (dl/dy x̂), sum dl/dy.
        dx, dgamma, dbeta = torch.ops.aten.native_batch_norm_backward(
            grads[0].to(wide), wide, scale, mean, var, None, None, False, eps, mask
        )
        if ctx.needs_input_grad[0]:
            own = torch.cat([dgamma, dbeta]).double()
            counted = own * ctx.weight if ctx.weight > 0 else torch.zeros_like(own)
            sums = ctx.link.sum(counted, ctx.group)
            if ctx.weight > 0:
                through = -scale * torch.rsqrt(var + eps)
                by_var, by_mean = (sums / (count * ctx.weight)).to(wide).chunk(2)
                dx += batch_norm(wide, mean, var, through * by_var, through * by_mean, eps=eps)
            else:
                dx.zero_()
        used = zip((dx, dgamma, dbeta), (x, gamma, gamma), ctx.needs_input_grad[:3], strict=True)
        return *(g.to(of.dtype) if needed else None for g, of, needed in used), *[None] * 7


def synchronise(
    model: nn.Module,
    group: Group,
    weight_of: Callable[[], float],
    on_wait: Callable[[float], None] = lambda seconds: None,
    on_lost: Callable[[GroupGoneError], None] | None = None,
    is_void: Callable[[], bool] = lambda: False,
) -> nn.Module:
    """The model with every BatchNorm synchronised over a group, which nothing else may use.

    Modules, parameters and buffers stay the objects they are. Called again, as for a new
    generation, it ties the layers to the new group, and those of copies of the model with them.
    """
    for name in local_layers(model):
        kind = type(model.get_submodule(name))
        if kind not in PLAIN and kind is not SyncNorm:
            raise ConfigError(
                "sync_batchnorm",
                f"{name or 'the model'} is a {kind.__name__}, which may compute in its own way; "
                "use a BatchNorm of torch.nn there, or leave sync_batchnorm out",
            )
    for link in _links(model):
        if link.group is not None:
            link.group = group
            return model
    link = Link(group, weight_of, on_wait, on_lost, is_void)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            # Another class for the same object: hooks and references to it stay valid.
            module.__class__ = SyncNorm
            cast(SyncNorm, module).link = link
    return model


def disconnect(model: nn.Module) -> None:
    """Make the synchronised layers of a model, and of its copies, plain BatchNorm again."""
    for link in _links(model):
        link.group = None


def _links(model: nn.Module) -> list[Link]:
    return [m.link for m in model.modules() if isinstance(m, SyncNorm) and m.link is not None]


def local_layers(model: nn.Module) -> list[str]:
    """Names of the layers that normalise by the statistics of their own worker's batch."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and not (isinstance(module, SyncNorm) and module.group is not None)
    ]


def local_stats_warning(names: Sequence[str]) -> str:
    """What to tell the user, once, of layers with local statistics."""
    some = ", ".join(name or "the model" for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"BatchNorm in {some}{more} normalises by the statistics of each worker's own share: the "
        "step differs from one on the whole batch, small shares make it noisy, and a share of one "
        "sample may not train at all. For statistics over all workers: "
        "session.prepare(model, ..., sync_batchnorm=True); to keep shares from getting small: "
        "evenstep.join(min_share=8)."
    )


@torch.no_grad()
def average_buffers(model: nn.Module, add_up: Callable[[Tensor], Tensor], weight: float) -> None:
    """Running means and variances of local layers become their mean over all workers by weight.

    `add_up` sums over the workers, who all call this at the same point, between steps: before the
    model is evaluated or saved, not in every step. Where nobody counts, and in `SyncNorm`, which
    has them equal, they stay.
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
        for piece, buffer in zip(_pieces(flat, buffers), buffers, strict=True):
            piece.copy_(buffer.flatten()).mul_(weight)
    flat = add_up(flat)
    if flat[0] > 0:
        for piece, buffer in zip(_pieces(flat, buffers), buffers, strict=True):
            buffer.copy_((piece / flat[0]).view_as(buffer))


def _pieces(flat: Tensor, buffers: Sequence[Tensor]) -> Sequence[Tensor]:
    pieces: Sequence[Tensor] = flat[1:].split([b.numel() for b in buffers])
    return pieces
