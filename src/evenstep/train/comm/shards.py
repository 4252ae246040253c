"""Tensors of which each process of a host holds a shard (DTensor): the part that is here.

Everything that evenstep does with a model's numbers it does to the shard that is here: every
process of a host has a counterpart on each other host, with the same shard.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn


def loaded(module: str, name: str) -> Any:
    """A class, for `isinstance`, if its module is imported: importing it takes a while."""
    return getattr(sys.modules.get(module), name, ())


def is_sharded(tensor: Any) -> bool:
    """Whether only a part of this tensor is in this process."""
    return isinstance(tensor, loaded("torch.distributed.tensor", "DTensor"))


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules on which `fully_shard` was called."""
    kind = loaded("torch.distributed.fsdp", "FSDPModule")
    return [module for module in model.modules() if isinstance(module, kind)]


def local(tensor: Any) -> torch.Tensor:
    """The part of a tensor that is here, without a copy; of a tensor that is whole, all of it."""
    here: torch.Tensor = tensor.detach().to_local() if is_sharded(tensor) else tensor
    return here


def like(part: torch.Tensor, tensor: Any) -> torch.Tensor:
    """A part as a tensor that is sharded as another one is, without a copy."""
    if not is_sharded(tensor):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def whole(tensor: Any) -> torch.Tensor:
    """All of a tensor; all processes of the host call it."""
    result: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return result


def part_of(whole_tensor: torch.Tensor, tensor: Any) -> torch.Tensor:
    """The part of a whole tensor that belongs here, if it is sharded as another one is."""
    if not is_sharded(tensor) or whole_tensor.shape != tensor.shape:
        return whole_tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = tensor.device_mesh, tensor.placements
    return local(distribute_tensor(whole_tensor, mesh, placements, src_data_rank=None)).clone()


def reshard(model: nn.Module) -> None:
    """Free the whole parameters that a forward pass has left: the shards are what counts."""
    for module in fsdp_modules(model):
        module.reshard()
