"""What a worker's training consists of: collected in one way, for joiners and for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from evenstep.errors import ConfigError
from evenstep.train.recover.flatten import take_apart

COMPILED = "_orig_mod."  # in the names of a model that went through torch.compile


class Stateful(Protocol):
    """An optimizer, a schedule, a scaler, or what else is registered."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class TrainingState:
    """Models, things with a `state_dict`, and plain values: numbers, text, tensors.

    `plain` is set by whoever collects, and replaced by `apply`.
    """

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        things: Mapping[str, Stateful],
        plain: dict[str, Any],
    ) -> None:
        self.models, self.things, self.plain = models, things, plain
        self.torn = False  # a mixture of two states: good for nothing until it is applied to

    def collect(self, *, grads: bool = False) -> dict[str, Any]:
        """Everything as one tree, with the tensors themselves in it, not copies."""
        tree = {
            "models": {name: dict(_tensors(model)) for name, model in self.models.items()},
            "things": {name: thing.state_dict() for name, thing in self.things.items()},
            "plain": self.plain,
        }
        if grads:
            tree["grads"] = {name: dict(_grads(model)) for name, model in self.models.items()}
        return tree

    def take_apart(self, *, grads: bool = False) -> tuple[bytes, list[torch.Tensor]]:
        """Structure and tensors of what `collect` gives; what cannot be kept is refused by name."""
        try:
            return take_apart(self.collect(grads=grads))
        except ConfigError as e:
            raise ConfigError(e.field.removeprefix("things."), e.problem) from None

    def check(self, tree: Mapping[str, Any]) -> None:
        """Refuse what was collected from other models or things, naming the first that differs."""
        _same_names("", tree["things"], self.things)
        _same_names("", tree["models"], self.models)
        for name, thing in self.things.items():
            _check_scaler(name, thing, tree["things"][name])
        for name, model in self.models.items():
            mine, theirs = dict(_tensors(model)), tree["models"][name]
            _same_names(f"{name}.", theirs, mine)
            for key, tensor in mine.items():
                ours, other = _told(tensor), _told(theirs[key])
                if ours != other:
                    raise ConfigError(
                        f"{name}.{key}", f"is {ours} here, {other} in the run; build the same model"
                    )

    @torch.no_grad()
    def apply(self, tree: Mapping[str, Any]) -> None:
        """Become what was collected. Parameters and buffers are written in place.

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
                    param.grad = None if grad is None else grad.to(param.device)
        for name, thing in self.things.items():
            try:
                thing.load_state_dict(tree["things"][name])
            except (ValueError, KeyError, RuntimeError) as e:
                raise ConfigError(name, f"does not take the run's state: {e}") from e
        self.plain = dict(tree["plain"])
        self.torn = False


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, param in _params(model):
        yield name, param.detach()
    for name, buffer in model.named_buffers():
        for dim, stride in enumerate(buffer.stride()):
            if stride == 0 and buffer.shape[dim] > 1:  # expanded: one number in many places
                buffer = buffer.narrow(dim, 0, 1)
        yield name.replace(COMPILED, ""), buffer.detach()


def _grads(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, param in _params(model):
        if param.grad is not None:
            yield name, param.grad


def _params(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, param in model.named_parameters():
        yield name.replace(COMPILED, ""), param


def _check_scaler(name: str, thing: Any, state: Mapping[str, Any]) -> None:
    """Raise where load_state_dict would be ignored: a disabled GradScaler does that silently."""
    if isinstance(thing, torch.amp.GradScaler) and thing.is_enabled() != bool(state):
        here, there = ("enabled", "disabled") if thing.is_enabled() else ("disabled", "enabled")
        raise ConfigError(
            name, f"is {here} here but {there} in the run; use the same enabled= on every worker"
        )


def _same_names(path: str, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    for name in theirs:
        if name not in mine:
            raise ConfigError(f"{path}{name}", "is in the run's state, but not here")
    for name in mine:
        if name not in theirs:
            raise ConfigError(f"{path}{name}", "is here, but not in the run's state")


def _told(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
