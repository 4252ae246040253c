"""Buckets of gradients: one flat buffer each, which is reduced as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.distributed_c10d import Work

from evenstep.train.comm.group import Group
from evenstep.train.comm.local_shards import is_sharded, like, local

FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first reduction starts early
BUCKET_BYTES = 25 << 20
HALF = (torch.float16, torch.bfloat16)
EXACT = (torch.float32, torch.float64)  # dtypes that hold the numbers of a pulse exactly


class Bucket:
    """The gradients of some parameters, and optionally a few extra numbers behind them."""

    def __init__(
        self, params: Sequence[torch.nn.Parameter], device: torch.device, num_extra: int = 0
    ) -> None:
        self.params = list(params)
        self._is_sharded = any(map(is_sharded, self.params))
        sizes, dtype = [local(p).numel() for p in self.params], self.params[0].dtype
        self._num = sum(sizes) * (2 if dtype.is_complex else 1)  # complex: two numbers
        # On the device where the group reduces: host memory, if GPUs and CPUs train together. With
        # spare capacity for when more workers join.
        self._buffer = torch.empty(
            self._num + 4 * num_extra, dtype=_real_part(dtype), device=device
        )
        gradients = self._buffer[: self._num].view(dtype)
        self.views = list(map(_like, gradients.split(sizes), map(local, self.params)))
        self.grads = list(map(like, self.views, self.params))  # sharded as the parameters are
        self.filled: set[int] = set()  # indices of the parameters whose gradients are in
        self.work: Work | None = None
        self.lent_to: Group | None = None  # the group whose all-reduce may still write to it
        self.reuse(device, num_extra)

    def reuse(self, device: torch.device, num_extra: int) -> bool:
        """Reuse the buffer with `num_extra` extra numbers; False if it is too small or in use."""
        num = self._num + num_extra
        if self.is_written_to or self._buffer.device != device or num > len(self._buffer):
            return False
        self.lent_to = None
        self.flat = self._buffer[:num]
        self.extra = self.flat[self._num :]
        self.filled.clear()
        return True

    @property
    def is_written_to(self) -> bool:
        """Whether an abandoned all-reduce may still write to it."""
        return self.lent_to is not None and not self.lent_to.is_gone

    def fill(self, index: int, weight: float) -> None:
        """Copy a parameter's weighted gradient in; no gradient, or no weight, counts as zero."""
        view, param = self.views[index], self.params[index]
        grad = param.grad
        if grad is None or weight == 0:
            view.zero_()  # not a product: a stand-in's gradient may be NaN
        else:
            here = local(grad) if self._is_sharded else grad
            if here.device == view.device:
                torch.mul(here, weight, out=view)
            else:
                view.copy_(here).mul_(weight)
        if grad is not None and grad.device == view.device:
            param.grad = self.grads[index]  # frees autograd's copy now, not all of them at the end
        self.filled.add(index)  # last: another device's thread may be about to start the all-reduce

    def fill_up(self, weight: float) -> None:
        """Fill in the parameters that this pass did not reach, with gradients of earlier ones."""
        for index in range(len(self.params)):
            if index not in self.filled:
                self.fill(index, weight)

    def squared_norm(self) -> float:
        """The squared norm of all gradients in the buffer."""
        gradients = self.flat[: self._num]
        return float(torch.dot(gradients, gradients))

    def is_finite(self) -> bool:
        """Whether all gradients in the buffer are finite. On a GPU nobody looks: it would wait."""
        if self.flat.device.type != "cpu":
            return True
        gradients = self.flat[: self._num]
        dtype = torch.float32 if gradients.dtype in HALF else gradients.dtype
        # One pass at the speed of memory. The sum may overflow where no gradient is infinite.
        total = float(gradients.sum(dtype=dtype))
        return math.isfinite(total) or bool(torch.isfinite(gradients).all())

    def hand_out(self, scale: float, used: Sequence[bool]) -> None:
        """Give the parameters their reduced gradients; None where no worker used a parameter."""
        if scale != 1.0:
            self.flat.mul_(scale)
        for param, grad, is_used in zip(self.params, self.grads, used, strict=True):
            if not is_used:
                param.grad = None
            elif param.device == grad.device:
                param.grad = grad  # no copy: the buffer is the gradient until the next pass
            else:
                param.grad = grad.to(param.device)
        self.filled.clear()
        self.work, self.lent_to = None, None


def _real_part(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a number's real part."""
    return dtype.to_real() if dtype.is_complex else dtype


def _like(piece: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A piece of the buffer with the shape and memory layout of a parameter."""
    dense = torch.empty_like(param, device="meta").stride() == param.stride()  # no gaps, no overlap
    return piece.as_strided(param.shape, param.stride()) if dense else piece.view(param.shape)


def make_buckets(
    params: Sequence[torch.nn.Parameter],
    device: torch.device,
    num_extra: int,
    before: Sequence[Bucket] = (),
) -> list[Bucket]:
    """Buckets for all gradients, with extra numbers behind the last; buffers are reused."""
    parts, buckets = _cut(params), []
    for i, part in enumerate(parts):
        num = num_extra if i == len(parts) - 1 else 0
        reused = bool(before) and before[i].reuse(device, num)
        buckets.append(before[i] if reused else Bucket(part, device, num))
    return buckets


def holds_exactly(params: Sequence[torch.nn.Parameter]) -> bool:
    """Whether the last bucket of these parameters holds the numbers of a pulse exactly."""
    return _real_part(params[0].dtype) in EXACT


def _cut(params: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters in reverse order, roughly that of their gradients, in buckets of similar size.

    A bucket holds one dtype on one device. The result depends on shapes alone.
    """
    buckets: list[list[torch.nn.Parameter]] = []
    bytes_left, kind = 0, None
    for param in reversed(params):
        size = param.numel() * param.element_size()
        if size > bytes_left or kind != (param.dtype, param.device):
            bytes_left = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
            kind = (param.dtype, param.device)
            buckets.append([])
        buckets[-1].append(param)
        bytes_left -= size
    return buckets
