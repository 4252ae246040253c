"""A copy of what a step changes before it is known to count."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from evenstep.train.recover.flatten import unflatten
from evenstep.train.recover.random_state import card_random, set_card_random
from evenstep.train.recover.state import TrainingState


class Undo:
    """Buffers, random state and a few more numbers as they were when the step began."""

    def __init__(self, model: torch.nn.Module, small: Sequence[Any]) -> None:
        self._params = list(model.parameters())  # all: a frozen one may be unfrozen later
        self._buffers = list(model.buffers())
        self._saved_buffers = [b.clone() for b in self._buffers]
        self._small = list(small)  # objects whose state is a few numbers, such as GradScalers
        self._small_states: list[Any] = []
        self._grads: list[torch.Tensor | None] = []
        self._device = self._params[0].device
        self._card_random: torch.Tensor | None = None
        self._save_random()
        self._everything: tuple[TrainingState, bytes, list[torch.Tensor]] | None = None
        self._registered: list[tuple[Any, Any]] = []  # objects and their states

    def save(self, *, accumulating: bool) -> None:
        """A step begins. Gradients matter only if earlier batches have accumulated in them."""
        if self._buffers:
            torch._foreach_copy_(self._saved_buffers, self._buffers)
        self._small_states = [obj.state_dict() for obj in self._small]
        self._grads = []
        if accumulating:
            self._grads = [None if p.grad is None else p.grad.clone() for p in self._params]
        self._save_random()
        self._everything = None
        self._registered = []

    def _save_random(self) -> None:
        self._random, self._card_random = torch.get_rng_state(), None
        if self._device.type == "cuda":  # else not even the placeholder: making it takes 30 us
            self._card_random = card_random(self._device)

    @property
    def has_everything(self) -> bool:
        """Whether `save_everything` was called in this step."""
        return self._everything is not None

    def save_everything(self, state: TrainingState) -> None:
        """An optimizer is about to step, and the training step may still turn out void."""
        structure, tensors = state.flatten()
        self._everything = state, structure, [tensor.clone() for tensor in tensors]

    def save_registered(self, objects: Iterable[Any]) -> None:
        """The step is void: undo what the rest of the loop does to these objects.

        Weight averages and the like are updated after the backward pass, so saving them now, when
        the loss of a worker is noticed, is early enough.
        """
        self._registered = [(obj, copy.deepcopy(obj.state_dict())) for obj in objects]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what the step has changed so far; the loop may go on and change it again.

        Gradients of this step alone stay, since the rest of the loop may look at them; `finish`
        drops them.
        """
        if self._everything is not None:
            state, structure, tensors = self._everything
            state.apply(unflatten(structure, [tensor.clone() for tensor in tensors]))
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._saved_buffers)
        for param, grad in zip(self._params, self._grads, strict=False):
            param.grad = None if grad is None else grad.clone()
        for obj, saved in zip(self._small, self._small_states, strict=True):
            obj.load_state_dict(saved)
        for obj, saved in self._registered:
            obj.load_state_dict(copy.deepcopy(saved))  # it may keep what it is given
        torch.set_rng_state(self._random)
        set_card_random(self._device, self._card_random)

    def finish(self) -> None:
        """The loop is done with the void step: nothing of it stays, its gradients included."""
        self.restore()
        if not self._grads:
            self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop the gradients of this step and of earlier ones."""
        self._grads = []
        for param in self._params:
            param.grad = None
