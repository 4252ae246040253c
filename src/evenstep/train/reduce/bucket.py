"""A flat buffer of gradients that are reduced together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.distributed_c10d import Work

from evenstep.train.comm.group import Group

FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first reduction starts early
BUCKET_BYTES = 25 << 20
EXACT = (torch.float32, torch.float64)  # dtypes that hold the numbers of a pulse exactly


class Bucket:
    """The gradients of some parameters, and optionally a few extra numbers behind them."""

    def __init__(
        self, params: Sequence[torch.nn.Parameter], device: torch.device, num_extra: int = 0
    ) -> None:
        self.params = list(params)
        sizes, dtype = [p.numel() for p in self.params], self.params[0].dtype
        self._num = sum(sizes) * (2 if dtype.is_complex else 1)  # a complex number is summed as two
        # On the device where the group reduces: host memory, if GPUs and CPUs train together. With
        # spare capacity for when more workers join.
        self._buffer = torch.empty(self._num + 4 * num_extra, dtype=real_part(dtype), device=device)
        gradients = self._buffer[: self._num].view(dtype)
        self.views = list(map(_like, gradients.split(sizes), self.params))
        self.filled: set[int] = set()  # indices of the parameters whose gradients are in
        self.work: Work | None = None
        self.lent_to: Group | None = None  # whose all-reduce may still write to it
        self.reuse(device, num_extra)

    def reuse(self, device: torch.device, num_extra: int) -> bool:
        """Reuse the buffer with so many extra numbers; False if it is too small or in use."""
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
        elif grad.device == view.device:
            torch.mul(grad, weight, out=view)
        else:
            view.copy_(grad).mul_(weight)
        if grad is not None and grad.device == view.device:
            param.grad = view  # frees autograd's copy now, not all of them at the end
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

    def hand_out(self, scale: float, used: Sequence[bool]) -> None:
        """Give the parameters their reduced gradients; None where no worker used a parameter."""
        if scale != 1.0:
            self.flat.mul_(scale)
        for param, view, is_used in zip(self.params, self.views, used, strict=True):
            if not is_used:
                param.grad = None
            elif param.device == view.device:
                param.grad = view  # no copy: the buffer is the gradient until the next pass
            else:
                param.grad = view.to(param.device)
        self.filled.clear()
        self.work, self.lent_to = None, None


def real_part(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a number's real part."""
    return dtype.to_real() if dtype.is_complex else dtype


def _like(piece: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
    """A piece of the buffer with the shape and memory layout of a parameter."""
    dense = torch.empty_like(param, device="meta").stride() == param.stride()  # no gaps, no overlap
    return piece.as_strided(param.shape, param.stride()) if dense else piece.view(param.shape)


def into_buckets(params: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
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
