"""Refuse what would train wrongly in silence: a second wrapper, sharded parameters, own groups."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any, Never

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from evenstep.errors import ConfigError

IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"  # DDP reads it of its module, when it is made
PLAIN = "the session reduces gradients already. Give and call the plain module, and make no DDP"
WHOLE = "each worker needs the whole parameters as plain tensors. Give a model that is not sharded"


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
    fsdp = "torch.distributed.fsdp"
    sharded = _loaded(fsdp, "FullyShardedDataParallel"), _loaded(fsdp, "FSDPModule")
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigError("model", f"{name or 'it'} is wrapped in DDP, but {PLAIN}")
        if isinstance(module, sharded):
            raise ConfigError("model", f"{name or 'it'} is sharded by FSDP: {WHOLE}")
    for name, param in model.named_parameters():
        if isinstance(param, _loaded("torch.distributed.tensor", "DTensor")):
            raise ConfigError("model", f"{name} is a DTensor: {WHOLE}")
    if _has_process_group() and _is_in_ddp(model):
        raise ConfigError("model", f"it is wrapped in DDP, but {PLAIN}")


def _loaded(module: str, name: str) -> Any:
    """A class, for `isinstance`, if its module is imported: importing it takes a while."""
    return getattr(sys.modules.get(module), name, ())


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


def check_process_group() -> None:
    """Raise if the script of an elastic run has made a process group with others."""
    if _has_process_group() and distributed.get_world_size() > 1:
        raise ConfigError(
            "torch.distributed",
            f"the script has made a process group of {distributed.get_world_size()}, but workers "
            "of this run come and go, and its collectives would hang. Do not call "
            "init_process_group; use session.sum, session.gather, session.rank and session.world",
        )


def _has_process_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()
