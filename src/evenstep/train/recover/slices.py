"""Cut tensors of any size and memory layout into slices of one size, to be sent one by one.

A slice of one large dense tensor in host memory is sent and received in place. Slices of small
tensors, or of tensors on a GPU, are copied through a staging buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from evenstep.errors import InvalidInputError
from evenstep.train.recover.flatten import bytes_of

SLICE_BYTES = 8 << 20
LARGE_BYTES = 1 << 20  # tensors of this size or more share no slice, so that they need no copy
ALIGNMENT = 16  # bytes; no element crosses the border between two slices


class TensorSpec(msgspec.Struct, frozen=True):
    """How a tensor is sent: its elements in the order in which the sender has them in memory."""

    dtype: str
    shape: tuple[int, ...]
    dims: tuple[int, ...]  # by stride, the largest first

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        dims = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(dims))

    def empty(self, device: str) -> torch.Tensor:
        """An uninitialised tensor of this dtype, shape and memory layout."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or sorted(self.dims) != list(range(len(self.shape))):
            raise InvalidInputError("state", f"has an impossible tensor: {self!r}")
        dense = torch.empty([self.shape[d] for d in self.dims], dtype=dtype, device=device)
        return dense.permute([self.dims.index(d) for d in range(len(self.dims))])

    def matches(self, other: TensorSpec) -> bool:
        """Whether dtype and shape are equal; the memory layout may differ."""
        return (self.dtype, self.shape) == (other.dtype, other.shape)

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of one tensor's elements, and its offset in a slice."""

    tensor: torch.Tensor  # with its dimensions permuted into the order of sending
    begin: int
    end: int
    offset: int  # in bytes

    @property
    def end_offset(self) -> int:
        return self.offset + (self.end - self.begin) * self.tensor.element_size()

    def views(self, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the tensor, each with the matching view of a slice's bytes."""
        offset = self.offset
        for view in flat_views(self.tensor, self.begin, self.end):
            end = offset + view.numel() * view.element_size()
            yield view, data[offset:end].view(view.dtype).view(view.shape)
            offset = end


class Slice:
    """The unit of sending: a part of one large tensor, or of several small ones."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    @property
    def num_bytes(self) -> int:
        return self.pieces[-1].end_offset

    @property
    def in_place(self) -> torch.Tensor | None:
        """Its bytes in the tensor's own memory; None if it must be copied."""
        piece, *others = self.pieces
        tensor = piece.tensor
        if others or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None
        size = tensor.element_size()
        return bytes_of(tensor)[piece.begin * size : piece.end * size]

    def data(self, staging: torch.Tensor) -> torch.Tensor:
        """The bytes to send or to receive into: in place, or the beginning of a staging buffer."""
        in_place = self.in_place
        return staging[: self.num_bytes] if in_place is None else in_place

    def pack(self, data: torch.Tensor) -> None:
        """Copy the tensors into `data`, unless it is in place."""
        for view, staged in self._staged(data):
            staged.copy_(view)

    def unpack(self, data: torch.Tensor) -> None:
        """Copy `data` into the tensors, unless it is in place."""
        for view, staged in self._staged(data):
            view.copy_(staged)

    def _staged(self, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self.in_place is None:
            for piece in self.pieces:
                yield from piece.views(data)


def cut_into_slices(tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> list[Slice]:
    """Slices of SLICE_BYTES: small tensors first, end to end, then each large one by itself."""
    slices: list[Slice] = []
    offset = 0  # from the beginning of the first slice
    pairs = zip(tensors, specs, strict=True)
    for tensor, spec in sorted(pairs, key=lambda pair: pair[0].nbytes >= LARGE_BYTES):
        ordered, size, begin = tensor.permute(spec.dims), tensor.element_size(), 0
        offset += -offset % (SLICE_BYTES if tensor.nbytes >= LARGE_BYTES else ALIGNMENT)
        while begin < ordered.numel():
            number, within = divmod(offset, SLICE_BYTES)
            end = min(ordered.numel(), begin + (SLICE_BYTES - within) // size)
            if number == len(slices):
                slices.append(Slice())
            slices[number].pieces.append(Piece(ordered, begin, end, within))
            offset += (end - begin) * size
            begin = end
    return slices


def flat_views(tensor: torch.Tensor, begin: int, end: int) -> Iterator[torch.Tensor]:
    """Views that together are the elements `begin` to `end` of the flattened tensor."""
    if tensor.is_contiguous():
        yield tensor.view(-1)[begin:end]
        return
    row = tensor[0].numel()
    first, last = -(-begin // row), end // row  # the whole rows
    if first > last:
        yield from flat_views(tensor[last], begin - last * row, end - last * row)
        return
    if begin < first * row:
        yield from flat_views(tensor[first - 1], begin - (first - 1) * row, row)
    if first < last:
        yield tensor[first:last]
    if last * row < end:
        yield from flat_views(tensor[last], 0, end - last * row)


def staging_buffers(slices: Sequence[Slice], num: int) -> torch.Tensor:
    """`num` buffers, each large enough for any slice that is not sent in place."""
    sizes = [s.num_bytes for s in slices if s.in_place is None]
    return torch.zeros(num, max(sizes, default=0), dtype=torch.uint8)
