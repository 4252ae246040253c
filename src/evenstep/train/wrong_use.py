"""Refuse what would silently train wrongly: other wrappers, sharded parameters, own groups."""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Never

import torch
from torch import distributed, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from evenstep.errors import ConfigError
from evenstep.train.comm.host import Host
from evenstep.train.comm.local_shards import is_sharded, loaded

IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"  # DDP reads it from its module
PLAIN = "the session reduces gradients already. Give and call the plain module, and make no DDP"
WHOLE = (
    "each worker needs the whole parameters as plain tensors. Give a model that is not sharded; a "
    "host whose processes shard one model with fully_shard joins with evenstep.adapters.fsdp.join"
)


class DdpRefusal:
    """Raises when DDP reads it from a prepared model. Copies of the model do not have it."""

    def __iter__(self) -> Never:
        raise ConfigError(
            "DistributedDataParallel",
            "this model is prepared by an evenstep session, and its gradients would be reduced "
            "twice. Use it as it is, without DDP; accelerator.prepare makes one too",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ()


def refuse_ddp(model: nn.Module) -> Callable[[], None]:
    """Make DDP around the model, or a part of it, fail. Returns a function that undoes this."""
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


def check_given(model: object, others: Sequence[Any], host: Host) -> None:
    """Raise for what cannot be prepared: a model of this host, and what goes with it."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "model",
            f"expected a torch.nn.Module, got {type(model).__name__}; give the model first: "
            "session.prepare(model, optimizer, ...)",
        )
    if host.is_shared:
        check_shards(model, host.size)
    else:
        check_model(model)
    for other in others:
        check_unwrapped(other)


def check_registered(
    name: str, thing: Any, known: Container[str], *, may_be_repeated: bool
) -> None:
    """Raise for what `session.register` cannot keep along with the run.

    `may_be_repeated`: the step at hand, in which the thing may have been updated already.
    """
    if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise ConfigError(name, "has no state_dict and load_state_dict")
    check_unwrapped(thing)
    if isinstance(thing, torch.optim.Optimizer):
        raise ConfigError(name, "is an optimizer: give it to session.prepare(model, ...)")
    if name in known:
        raise ConfigError(name, "is registered already; choose another name")
    if may_be_repeated and isinstance(thing, LRScheduler | GradScaler):
        raise ConfigError(
            name,
            "register schedulers and GradScalers before the first batch: a step that is "
            "repeated after the loss of a worker would otherwise update this one twice",
        )


def refuse_sharded(host: Host, what: str) -> None:
    """Raise if the processes of a host shard the model."""
    if host.is_shared:
        raise ConfigError(
            "fsdp.join", f"{what} is not there for hosts that shard their model: leave it out"
        )


def check_model(model: nn.Module) -> None:
    """Raise if the model's parameters are reduced or sharded by something else."""
    _check_wrappers(model)
    for name in _sharded_modules(model):
        raise ConfigError("model", f"{name or 'it'} is sharded by FSDP: {WHOLE}")
    for name, param in model.named_parameters():
        if is_sharded(param):
            raise ConfigError("model", f"{name} is a DTensor: {WHOLE}")


def check_not_sharded_since(model: nn.Module) -> None:
    """Raise if FSDP has replaced parameters of a model that was prepared as a whole."""
    for name in _sharded_modules(model):
        raise ConfigError(
            "model",
            f"{name or 'it'} was sharded by FSDP after session.prepare, so its parameters are not "
            f"those that were prepared: {WHOLE}",
        )


def _sharded_modules(model: nn.Module) -> Iterator[str]:
    """Names of the modules on which `fully_shard` was called."""
    kind = loaded("torch.distributed.fsdp", "FSDPModule")
    return (name for name, module in model.named_modules() if isinstance(module, kind))


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
    if hasattr(thing, "zero_grad"):  # so it is no third-party scheduler
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
