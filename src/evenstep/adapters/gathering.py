"""All-gather of per-batch results that tolerates lost workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, SequentialSampler

from evenstep.errors import ConfigError
from evenstep.train.recover.flatten import bytes_of, flatten, unflatten

CPU = torch.device("cpu")


def gather(
    add_up: Callable[[torch.Tensor], torch.Tensor], own: Mapping[int, bytes], num: int
) -> dict[int, bytes]:
    """All workers' results by number, out of `num`; those of workers lost on the way are missing.

    `add_up` returns a sum over all workers. A result that two workers have is left out, too.
    """
    table = torch.zeros(num, 2, dtype=torch.float64)
    for i, data in own.items():
        table[i] = torch.tensor([1, len(data) + 1])
    rows = add_up(table).long().tolist()
    sizes = {i: size for i, (copies, size) in enumerate(rows) if copies == 1}
    begins, total = {}, 0
    for i, size in sizes.items():
        begins[i], total = total, total + size
    buffer = torch.zeros(total, dtype=torch.uint8)
    for i in own.keys() & sizes.keys():  # the 1 marks that the data arrived
        marked = torch.frombuffer(bytearray(b"\1" + own[i]), dtype=torch.uint8)
        buffer[begins[i] : begins[i] + sizes[i]] = marked
    buffer = add_up(buffer)
    parts = {i: buffer[begin : begin + sizes[i]] for i, begin in begins.items()}
    return {i: part[1:].numpy().tobytes() for i, part in parts.items() if part[0] == 1}


def to_bytes(tree: Any) -> bytes:
    """A tree of tensors, numbers and text as bytes, without pickling."""
    structure, tensors = flatten(tree)
    dense = (tensor.detach().cpu().contiguous() for tensor in tensors)
    parts = [[t.dtype, list(t.shape), bytes_of(t).numpy().tobytes()] for t in dense]
    return flatten([structure, parts])[0]


def from_bytes(data: bytes, device: torch.device = CPU) -> Any:
    """The tree again, with its tensors on a device."""
    structure, parts = unflatten(data, [])
    tensors = [_tensor(*part).to(device) for part in parts]
    return unflatten(structure, tensors)


def _tensor(dtype: torch.dtype, shape: list[int], data: bytes) -> torch.Tensor:
    if not data:  # frombuffer refuses to make an empty one
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def ordered_batches(loader: Any, field: str, way_out: str) -> BatchSampler:
    """The loader's batch sampler. Refuses loaders whose batches may differ between workers."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, BatchSampler) or not isinstance(sampler.sampler, SequentialSampler):
        raise ConfigError(
            field,
            f"is evaluated by all workers together, so all need the same batches: {way_out}",
        )
    return sampler
