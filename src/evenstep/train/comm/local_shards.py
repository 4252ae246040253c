"""The local shards of tensors that a host's processes share (DTensor).

Evenstep only ever works on the local shard of a parameter: every process of a host has a
counterpart on each other host that holds the same shard.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn


def loaded(module: str, name: str) -> Any:
    """A class for `isinstance`, if its module is loaded already: importing it is slow."""
    return getattr(sys.modules.get(module), name, ())


def is_sharded(tensor: Any) -> bool:
    """Whether this process holds only a shard of the tensor."""
    return isinstance(tensor, loaded("torch.distributed.tensor", "DTensor"))


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules on which `fully_shard` was called."""
    kind = loaded("torch.distributed.fsdp", "FSDPModule")
    return [module for module in model.modules() if isinstance(module, kind)]


def local(tensor: Any) -> torch.Tensor:
    """The local shard of a tensor, without a copy; a tensor that is not sharded, as it is."""
    here: torch.Tensor = tensor.detach().to_local() if is_sharded(tensor) else tensor
    return here


def like(part: torch.Tensor, tensor: Any) -> torch.Tensor:
    """A local shard as a tensor sharded like another one, without a copy."""
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
    """The whole tensor, gathered; all processes of the host call it."""
    result: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return result


def part_of(whole_tensor: torch.Tensor, tensor: Any) -> torch.Tensor:
    """The local shard of a whole tensor, if it is sharded like another one."""
    if not is_sharded(tensor) or whole_tensor.shape != tensor.shape:
        return whole_tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = tensor.device_mesh, tensor.placements
    return local(distribute_tensor(whole_tensor, mesh, placements, src_data_rank=None)).clone()


def reshard(model: nn.Module) -> None:
    """Free the unsharded parameters that a forward pass left behind."""
    for module in fsdp_modules(model):
        module.reshard()
