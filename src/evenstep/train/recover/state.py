"""A worker's training state, collected in the same way for joiners and for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from evenstep.errors import ConfigError
from evenstep.train.comm.local_shards import is_sharded, like, local, part_of
from evenstep.train.recover.flatten import flatten

Take = Callable[[torch.Tensor], torch.Tensor]

COMPILED = "_orig_mod."  # torch.compile puts it into the names of a model's tensors


class Stateful(Protocol):
    """An optimizer, a scheduler, a GradScaler, or any object that the script registered."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class TrainingState:
    """Models, objects with a `state_dict`, and plain values: numbers, text, tensors.

    Set `plain` before collecting; `apply` replaces it.
    """

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        stateful: Mapping[str, Stateful],
        plain: dict[str, Any],
    ) -> None:
        self.models, self.stateful, self.plain = models, stateful, plain
        self.torn = False  # partly overwritten: unusable until `apply` succeeds

    def collect(self, *, grads: bool = False, take: Take = local) -> dict[str, Any]:
        """Everything as one tree that holds the tensors themselves, not copies.

        `take` maps a sharded tensor to what to include of it: by default, the local shard.
        """
        tree = {
            "models": {name: dict(_tensors(model, take)) for name, model in self.models.items()},
            "things": {name: _state_of(obj, take) for name, obj in self.stateful.items()},
            "plain": self.plain,
        }
        if grads:
            tree["grads"] = {name: dict(_grads(model)) for name, model in self.models.items()}
        return tree

    def flatten(
        self, *, grads: bool = False, take: Take = local
    ) -> tuple[bytes, list[torch.Tensor]]:
        """The structure and the tensors of `collect()`; unsupported values raise by name."""
        try:
            return flatten(self.collect(grads=grads, take=take))
        except ConfigError as e:
            raise ConfigError(e.field.removeprefix("things."), e.problem) from None

    def check(self, tree: Mapping[str, Any]) -> None:
        """Refuse a tree of different models or objects, naming the first difference."""
        _check_names("", tree["things"], self.stateful)
        _check_names("", tree["models"], self.models)
        for name, obj in self.stateful.items():
            _check_scaler(name, obj, tree["things"][name])
        for name, model in self.models.items():
            ours, theirs = dict(_tensors(model)), tree["models"][name]
            _check_names(f"{name}.", theirs, ours)
            for key, tensor in ours.items():
                here, in_run = _describe(tensor), _describe(theirs[key])
                if here != in_run:
                    raise ConfigError(
                        f"{name}.{key}",
                        f"is {here} here, {in_run} in the run; build the same model",
                    )

    @torch.no_grad()
    def apply(self, tree: Mapping[str, Any]) -> None:
        """Take over a collected state. Parameters and buffers are written in place.

        The other tensors of the tree are kept, not copied. Gradients are replaced if it has any.
        """
        self.check(tree)
        self.torn = True
        for name, model in self.models.items():
            for key, tensor in _tensors(model):
                new = tree["models"][name][key]
                if new.data_ptr() != tensor.data_ptr():
                    tensor.copy_(new)
            if "grads" in tree:
                for key, param in _params(model):
                    grad = tree["grads"][name].get(key)
                    param.grad = None if grad is None else like(grad.to(param.device), param)
        for name, obj in self.stateful.items():
            try:
                obj.load_state_dict(_with_params(obj, tree["things"][name], like))
            except (ValueError, KeyError, RuntimeError) as e:
                raise ConfigError(name, f"cannot load the run's state: {e}") from e
        self.plain = dict(tree["plain"])
        self.torn = False

    def parts_of(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """A tree of whole tensors, with those that are sharded here cut to the local shards."""
        models = {
            name: {
                **tree["models"][name],
                **{
                    key: part_of(tree["models"][name][key], param)
                    for key, param in _params(model)
                    if key in tree["models"][name]
                },
            }
            for name, model in self.models.items()
            if name in tree["models"]
        }
        things = {
            name: _with_params(self.stateful.get(name), state, part_of)
            for name, state in tree["things"].items()
        }
        return {**tree, "models": {**tree["models"], **models}, "things": things}


def _state_of(obj: Stateful, take: Take) -> dict[str, Any]:
    return _with_params(obj, obj.state_dict(), lambda value, _: take(value))


def _with_params(
    obj: Any, state: dict[str, Any], change: Callable[[torch.Tensor, Any], torch.Tensor]
) -> dict[str, Any]:
    """An optimizer's state, with the values that belong to sharded parameters changed."""
    if not isinstance(obj, torch.optim.Optimizer):
        return state
    params = [param for group in obj.param_groups for param in group["params"]]
    if not any(map(is_sharded, params)):
        return state

    def changed(param: Any, value: Any) -> Any:
        shapes = param.shape, local(param).shape
        return change(value, param) if torch.is_tensor(value) and value.shape in shapes else value

    values = {
        index: {name: changed(params[index], value) for name, value in own.items()}
        for index, own in state["state"].items()
    }
    return {**state, "state": values}


def _tensors(model: torch.nn.Module, take: Take = local) -> Iterator[tuple[str, torch.Tensor]]:
    for name, param in _params(model):
        yield name, take(param.detach())
    for name, buffer in model.named_buffers():
        for dim, stride in enumerate(buffer.stride()):
            if stride == 0 and buffer.shape[dim] > 1:  # expanded: it is one element in memory
                buffer = buffer.narrow(dim, 0, 1)
        yield name.replace(COMPILED, ""), buffer.detach()


def _grads(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, param in _params(model):
        if param.grad is not None:
            yield name, local(param.grad)


def _params(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, param in model.named_parameters():
        yield name.replace(COMPILED, ""), param


def _check_scaler(name: str, obj: Any, state: Mapping[str, Any]) -> None:
    """Raise if a GradScaler is enabled on one side only: load_state_dict would ignore the state."""
    if isinstance(obj, torch.amp.GradScaler) and obj.is_enabled() != bool(state):
        here, in_run = ("enabled", "disabled") if obj.is_enabled() else ("disabled", "enabled")
        raise ConfigError(
            name, f"is {here} here but {in_run} in the run; use the same enabled= on every worker"
        )


def _check_names(prefix: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for name in theirs:
        if name not in ours:
            raise ConfigError(f"{prefix}{name}", "is in the run's state, but not in this process")
    for name in ours:
        if name not in theirs:
            raise ConfigError(f"{prefix}{name}", "is in this process, but not in the run's state")


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
