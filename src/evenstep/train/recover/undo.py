"""Undoes what a void step did to schedulers and to objects that the script has registered."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from evenstep.errors import EvenstepError

SMALL_BYTES = 1 << 16  # of a state that is copied in every step


class UndoScheduler:
    """A scheduler may step anywhere in the loop's body, so its small state is always saved."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler
        self._state: dict[str, Any] = {}
        self._groups: list[dict[str, Any]] = []

    def begin_step(self) -> None:
        """Save the state."""
        self._state = dict(self._scheduler.state_dict())
        self._groups = [
            {name: _copied(value) for name, value in group.items() if name != "params"}
            for group in self._scheduler.optimizer.param_groups
        ]

    def restore(self) -> None:
        """Return to the state at the beginning of the step."""
        self._scheduler.load_state_dict(dict(self._state))
        for group, saved in zip(self._scheduler.optimizer.param_groups, self._groups, strict=True):
            group.update({name: _copied(value) for name, value in saved.items()})


class UndoRegistered:
    """An object with a `state_dict`. A large state is copied only once the step is void.

    Weight averages and the like are updated after the backward pass, so that is early enough. An
    update before the backward pass is detected.
    """

    def __init__(self, name: str, obj: Any) -> None:
        self._name, self.obj = name, obj
        self._saved: Any = None
        self._before: Any = None
        tensors = [leaf for leaf in tree_leaves(obj.state_dict()) if torch.is_tensor(leaf)]
        self._is_small = sum(t.numel() * t.element_size() for t in tensors) <= SMALL_BYTES
        is_module = isinstance(obj, torch.nn.Module)
        self._tensors = [*obj.parameters(), *obj.buffers()] if is_module else []

    def begin_step(self) -> None:
        """Save the state, or a fingerprint that shows whether it changes."""
        self._saved, self._before = None, None
        if self._is_small:
            self._saved = copy.deepcopy(self.obj.state_dict())
        else:
            self._before = self._fingerprint()

    def step_is_void(self, step: int) -> None:
        """Save a large state. Raises if the step has changed it already."""
        if self._is_small:
            return
        if self._fingerprint() != self._before:
            raise EvenstepError(
                f"step {step} is void because a worker was lost, but {self._name!r}, registered "
                "with the session, was updated in it before the backward pass, and that cannot be "
                "undone. Update it after backward(), and resume with evenstep run --resume."
            )
        self._saved = copy.deepcopy(self.obj.state_dict())

    def restore(self) -> None:
        """Return to the state at the beginning of the step, if it was kept."""
        if self._saved is not None:
            self.obj.load_state_dict(copy.deepcopy(self._saved))  # it may keep a reference

    def _fingerprint(self) -> Any:
        if self._tensors:
            return sum(tensor._version for tensor in self._tensors)
        leaves = tree_leaves(self.obj.state_dict())
        return [(id(x), x._version) if torch.is_tensor(x) else x for x in leaves]


def _copied(value: Any) -> Any:
    """A tensor may be changed in place; everything else in a group is replaced."""
    return value.clone() if torch.is_tensor(value) else value
