"""Refuse what would train wrongly in silence: a second wrapper, sharded parameters, own groups."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Never

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from evenstep.errors import ConfigError
from evenstep.train.comm.shards import is_sharded, loaded

IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"  # DDP reads it of its module, when it is made
PLAIN = "the session reduces gradients already. Give and call the plain module, and make no DDP"
WHOLE = (
    "each worker needs the whole parameters as plain tensors. Give a model that is not sharded; a "
    "host whose processes shard one model with fully_shard joins with evenstep.adapters.fsdp.join"
)


class DdpRefusal:
    """What DDP finds in a prepared model where it looks for names. Copies hold none."""

    def __iter__(self) -> Never:
        raise ConfigError(
            "DistributedDataParallel",
            "this model is prepared by an evenstep session, and its gradients would be reduced "
            "twice. Use it as it is, without DDP; accelerator.prepare makes one too",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ()


def refuse_ddp(model: nn.Module) -> Callable[[], None]:
    """Let DDP around the model, or a part of it, fail. Returns a function that ends this."""
    refusal = DdpRefusal()
    before = [(module, module.__dict__.get(IGNORED_BY_DDP)) for module in model.modules()]
    for module, _ in before:
        module.__dict__[IGNORED_BY_DDP] = refusal

    def release() -> None:
        for module, names in before:
            module.__dict__.pop(IGNORED_BY_DDP, None)
            if names is not None:
                module.__dict__[IGNORED_BY_DDP] = names

    return release


def check_model(model: nn.Module) -> None:
    """Raise if something else reduces or shards the model's parameters."""
    _check_wrappers(model)
    sharded = loaded("torch.distributed.fsdp", "FSDPModule")
    for name, module in model.named_modules():
        if isinstance(module, sharded):
            raise ConfigError("model", f"{name or 'it'} is sharded by FSDP: {WHOLE}")
    for name, param in model.named_parameters():
        if is_sharded(param):
            raise ConfigError("model", f"{name} is a DTensor: {WHOLE}")


def _check_wrappers(model: nn.Module) -> None:
    first_fsdp = loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigError("model", f"{name or 'it'} is wrapped in DDP, but {PLAIN}")
        if isinstance(module, first_fsdp):
            raise ConfigError("model", f"{name or 'it'} is sharded by FSDP: {WHOLE}")
    if _has_process_group() and _is_in_ddp(model):
        raise ConfigError("model", f"it is wrapped in DDP, but {PLAIN}")


def check_shards(model: nn.Module, size: int) -> None:
    """Raise unless the model is sharded over the processes of its host in a way that is handled."""
    _check_wrappers(model)
    for name, param in model.named_parameters():
        place = f"{name} {tuple(param.shape)}"
        if param.device.type != "cpu":
            raise ConfigError("model", f"{place} is on {param.device}: sharded hosts are for CPUs")
        if not is_sharded(param):
            raise ConfigError(
                "model",
                f"{place} is not sharded, so each process of the host would train its own. Call "
                "fully_shard(model) on the whole model before the optimizer is made, and ignore no "
                "parameters",
            )
        layout: Any = param
        if layout.device_mesh.size() != size or not all(p.is_shard() for p in layout.placements):
            raise ConfigError(
                "model",
                f"{place} is placed as {layout.placements} on {layout.device_mesh}, but it must be "
                f"sharded over the {size} processes of the host: fully_shard(model) without a mesh "
                "of your own",
            )
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None:
            raise ConfigError(
                "model",
                f"{name} keeps running statistics, which differ between the processes of a host. "
                "Use a normalisation without them, such as LayerNorm or GroupNorm",
            )


def _is_in_ddp(model: nn.Module) -> bool:
    """Whether there is a DDP around the model or a part of it. It leaves no trace in them."""
    own = {id(param) for param in model.parameters()}
    wrappers = (o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel))
    return any(id(param) in own for wrapper in wrappers for param in wrapper.parameters())


def check_unwrapped(thing: Any) -> None:
    """Raise if this is a wrapper around an optimizer: hooks on it would not see its steps."""
    inner = getattr(thing, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer) or isinstance(thing, LRScheduler | nn.Module):
        return
    if hasattr(thing, "zero_grad"):  # not a scheduler of someone else's kind
        raise ConfigError(
            "optimizer",
            f"{type(thing).__name__} wraps {type(inner).__name__}: give that one, its attribute "
            "`optimizer`, to session.prepare. The script may go on using the wrapper",
        )


def check_process_group(host_size: int) -> None:
    """Raise if the script of an elastic run has made a process group with other workers."""
    if _has_process_group() and distributed.get_world_size() > host_size:
        raise ConfigError(
            "torch.distributed",
            f"the script has made a process group of {distributed.get_world_size()}, but workers "
            "of this run come and go, and its collectives would hang. Do not call "
            "init_process_group; use session.sum, session.gather, session.rank and session.world",
        )


def _has_process_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()
