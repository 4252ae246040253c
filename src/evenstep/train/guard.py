"""What a void step must not touch: optimizers and schedulers do nothing, the rest is put back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


def skip_if(void: Callable[[], bool], thing: Any) -> None:
    """Make `thing.step()` do nothing while a step is void."""
    step = thing.step

    @functools.wraps(step)  # a scheduler knows by a mark on the optimizer's step that it follows it
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return None if void() else step(*args, **kwargs)

    if isinstance(thing, torch.optim.Optimizer):
        thing.__dict__["step"] = guarded  # as schedulers do
    else:
        # A scheduler's attributes are its state_dict: none may be added.
        kind = type(thing)
        thing.__class__ = type(kind.__name__, (kind,), {"step": staticmethod(guarded)})


class Undo:
    """What a step changes before it is known to count, as it was when the step began."""

    def __init__(self, model: torch.nn.Module, small: Sequence[Any]) -> None:
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._buffers = list(model.buffers())
        self._kept = [b.clone() for b in self._buffers]
        self._small = list(small)  # objects whose state is a few numbers, as a GradScaler's
        self._states: list[Any] = []
        self._grads: list[torch.Tensor | None] = []
        self._random = torch.get_rng_state()

    def keep(self, *, accumulating: bool) -> None:
        """A step begins. Gradients matter only if those of earlier batches are in them."""
        if self._buffers:
            torch._foreach_copy_(self._kept, self._buffers)
        self._states = [thing.state_dict() for thing in self._small]
        self._grads = []
        if accumulating:
            self._grads = [None if p.grad is None else p.grad.clone() for p in self._params]
        self._random = torch.get_rng_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what the step has changed so far; as often as the loop goes on changing it.

        Gradients that belong to this step alone stay, since the rest of the loop may look at them;
        `forget` takes them away.
        """
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._kept)
        for param, grad in zip(self._params, self._grads, strict=False):
            param.grad = None if grad is None else grad.clone()
        for thing, state in zip(self._small, self._states, strict=True):
            thing.load_state_dict(state)
        torch.set_rng_state(self._random)

    def forget(self) -> None:
        """The step is over: nothing of its gradients is left."""
        self.restore()
        if not self._grads:
            for param in self._params:
                param.grad = None
