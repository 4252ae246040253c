"""All ranks must train the same model: same parameters and buffers, in the same order."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch

from evenstep.errors import EvenstepError
from evenstep.train.comm.local_shards import is_sharded, local
from evenstep.train.comm.shared_store import SharedStore


class ModelsDifferError(EvenstepError, ValueError):
    """Two ranks prepared different models."""


def check_models(store: SharedStore, model: torch.nn.Module) -> None:
    """Refuse models that differ between ranks, naming the first parameter that does."""
    mine = rows(model)
    store.publish("model", mine)
    leaders = [tuple(row) for row in store.read("model", 0)]
    for theirs, ours in zip(leaders, mine, strict=False):
        if theirs != ours:
            raise ModelsDifferError(
                f"rank {store.rank} has {_describe(ours)} where rank 0 has {_describe(theirs)}. "
                "Build the same model on every rank."
            )
    if len(leaders) != len(mine):
        raise ModelsDifferError(
            f"rank {store.rank} has {len(mine)} parameters and buffers, rank 0 {len(leaders)}. "
            "Build the same model on every rank."
        )


def model_digest(model: torch.nn.Module) -> str:
    """A short digest of the names, shapes and types of a model's parameters and buffers."""
    return blake2b(repr(rows(model)).encode(), digest_size=16).hexdigest()


def rows(model: torch.nn.Module) -> list[tuple[Any, ...]]:
    """One row per parameter and buffer: everything that must be equal on all workers."""
    params = [_row(n, p, p.requires_grad) for n, p in model.named_parameters()]
    return params + [_row(n, b, False) for n, b in model.named_buffers()]


def _row(name: str, tensor: torch.Tensor, trains: bool) -> tuple[Any, ...]:
    # Tensors are sent and summed as they lie in memory, channels-last or not.
    parts = f", {tuple(local(tensor).shape)} of it here" if is_sharded(tensor) else ""
    layout = "" if tensor.is_contiguous() else f", strides {tensor.stride()}"
    return name, list(tensor.shape), str(tensor.dtype), trains, layout + parts


def _describe(row: Any) -> str:
    name, shape, dtype, trains, layout = row
    return f"{name} {tuple(shape)} {dtype}{'' if trains else ' (frozen)'}{layout}"
