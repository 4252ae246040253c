"""Undoes what a void step did to schedulers and to objects that the script has registered."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from evenstep.errors import EvenstepError
from evenstep.train.updates import UNCHANGED, Change

SMALL_BYTES = 1 << 16  # of a state that is copied in every step
PLAIN = (bool, int, float, complex, str, bytes, type(None))  # compared by value


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


class Fingerprint:
    """Shows whether a state has changed since, without reading its tensors."""

    def __init__(self, state: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Of a `state_dict`; or, of a module, of the tensors that it keeps for good."""
        leaves = [] if tensors else tree_leaves(state)
        self.numbers = [x for x in leaves if isinstance(x, PLAIN)]
        # Kept, since their memory might belong to other tensors soon.
        self._tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        # By their memory: a module's state_dict has another view of it each time it is asked.
        self._places = [x.data_ptr() for x in self._tensors]
        self._version = sum([x._version for x in tensors or versioned(self._tensors)])

    def has_same_tensors(self, other: Fingerprint) -> bool:
        """Whether the tensors are the same ones, with any values."""
        return self._places == other._places

    def change_until(self, later: Fingerprint) -> Change:
        """What has changed from this one to a later one."""
        tensors = self._version != later._version or not self.has_same_tensors(later)
        return Change(numbers=self.numbers != later.numbers, tensors=tensors)


class UndoRegistered:
    """An object with a `state_dict`. A large state is copied only once the step is void.

    Weight averages and the like are updated after the backward pass, so that is early enough. An
    update before the backward pass is detected.
    """

    def __init__(self, name: str, obj: Any) -> None:
        self._name, self.obj = name, obj
        self._saved: Any = None
        tensors = [leaf for leaf in tree_leaves(obj.state_dict()) if torch.is_tensor(leaf)]
        size = sum(t.numel() * t.element_size() for t in tensors)
        is_module = isinstance(obj, torch.nn.Module)
        self._tensors = versioned([*obj.parameters(), *obj.buffers()]) if is_module else []
        self._before = self._fingerprint()
        # A state of copies looks changed whenever it is asked for.
        self._is_copied = size <= SMALL_BYTES or self._gives_copies(self._before)

    def begin_step(self) -> None:
        """Save the state, or a fingerprint that shows whether it changes."""
        state = self.obj.state_dict() if self._is_copied or not self._tensors else None
        self._saved = copy.deepcopy(state) if self._is_copied else None
        self._before = Fingerprint(state, self._tensors)

    def change(self) -> Change:
        """What has changed in this step."""
        now = self._fingerprint()
        change = self._before.change_until(now)
        if change.tensors and self._gives_copies(now):
            return change._replace(tensors=False)  # unknown
        return change

    def _gives_copies(self, now: Fingerprint) -> bool:
        return not now.has_same_tensors(self._fingerprint())

    def step_is_void(self, step: int) -> None:
        """Save a large state. Raises if the step has changed it already."""
        if self._is_copied:
            return
        if self._before.change_until(self._fingerprint()) != UNCHANGED:
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

    def _fingerprint(self) -> Fingerprint:
        return Fingerprint(None if self._tensors else self.obj.state_dict(), self._tensors)


def versioned(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that count their changes; those made in inference mode do not."""
    return [x for x in tensors if not x.is_inference()]


def _copied(value: Any) -> Any:
    """A tensor may be changed in place; everything else in a group is replaced."""
    return value.clone() if torch.is_tensor(value) else value
