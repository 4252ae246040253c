"""What a void step must not touch: optimizers and schedulers do nothing, the rest is put back."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from evenstep.train.recover.flatten import put_together
from evenstep.train.recover.state import State

KNOWN_BATCHES = 1000  # after which a script has shown what it does in a batch
CARD_BYTES = 16  # of the state of a generator on CUDA: a seed and how far it is


def skip_if(void: Callable[[], bool], thing: Any) -> Callable[[], None]:
    """Skip `thing.step()` while a step is void. Returns a function that undoes this."""
    step = thing.step
    before = {"step": thing.__dict__["step"]} if "step" in thing.__dict__ else {}

    @functools.wraps(step)  # a scheduler knows by a mark on the optimizer's step that it follows it
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return None if void() else step(*args, **kwargs)

    if isinstance(thing, torch.optim.Optimizer):
        thing.__dict__["step"] = guarded  # as schedulers do

        def undo() -> None:
            if thing.__dict__.get("step") is guarded:  # else a scheduler has wrapped it since
                del thing.__dict__["step"]
                thing.__dict__.update(before)
    else:
        # A scheduler's attributes are its state_dict: none may be added.
        kind = type(thing)
        thing.__class__ = type(kind.__name__, (kind,), {"step": staticmethod(guarded)})

        def undo() -> None:
            thing.__class__ = kind

    return undo


def card_random(device: torch.device) -> torch.Tensor:
    """The state of the generator of a card; of another device, what stands for none.

    Always of one size: workers with and without a card hand over one state together.
    """
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.full((CARD_BYTES,), 255, dtype=torch.uint8)  # zeros: those of a seed of 0


def set_card_random(device: torch.device, state: torch.Tensor | None) -> None:
    """Put back what `card_random` gave, be it elsewhere. Nothing, where either had no card."""
    if device.type == "cuda" and state is not None and not bool((state == 255).all()):
        torch.cuda.set_rng_state(state, device)


class Undo:
    """What a step changes before it is known to count, as it was when the step began."""

    def __init__(self, model: torch.nn.Module, small: Sequence[Any]) -> None:
        self._params = list(model.parameters())  # one that rests now may be unfrozen later
        self._buffers = list(model.buffers())
        self._kept = [b.clone() for b in self._buffers]
        self._small = list(small)  # objects whose state is a few numbers, as a GradScaler's
        self._states: list[Any] = []
        self._grads: list[torch.Tensor | None] = []
        self._device = self._params[0].device
        self._card_random: torch.Tensor | None = None
        self._keep_random()
        self._all: tuple[State, bytes, list[torch.Tensor]] | None = None
        self._registered: list[tuple[Any, Any]] = []  # objects and their states

    def keep(self, *, accumulating: bool) -> None:
        """A step begins. Gradients matter only if those of earlier batches are in them."""
        if self._buffers:
            torch._foreach_copy_(self._kept, self._buffers)
        self._states = [thing.state_dict() for thing in self._small]
        self._grads = []
        if accumulating:
            self._grads = [None if p.grad is None else p.grad.clone() for p in self._params]
        self._keep_random()
        self._all = None
        self._registered = []

    def _keep_random(self) -> None:
        self._random, self._card_random = torch.get_rng_state(), None
        if self._device.type == "cuda":  # else not even what stands for none: it takes 30 us
            self._card_random = card_random(self._device)

    @property
    def has_all(self) -> bool:
        """Whether `keep_all` was called in this step."""
        return self._all is not None

    def keep_all(self, state: State) -> None:
        """An optimizer is about to step, and the step may yet turn out void."""
        plan, tensors = state.take_apart()
        self._all = state, plan, [tensor.clone() for tensor in tensors]

    def keep_registered(self, things: Iterable[Any]) -> None:
        """The step is void: what the rest of the loop does to these will be undone.

        Averages of parameters and the like are updated after the backward pass, so it is enough to
        keep them now.
        """
        self._registered = [(thing, copy.deepcopy(thing.state_dict())) for thing in things]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what the step has changed so far; as often as the loop goes on changing it.

        Gradients that belong to this step alone stay, since the rest of the loop may look at them;
        `forget` takes them away.
        """
        if self._all is not None:
            state, plan, tensors = self._all
            state.apply(put_together(plan, [tensor.clone() for tensor in tensors]))
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._kept)
        for param, grad in zip(self._params, self._grads, strict=False):
            param.grad = None if grad is None else grad.clone()
        for thing, state in zip(self._small, self._states, strict=True):
            thing.load_state_dict(state)
        for thing, state in self._registered:
            thing.load_state_dict(copy.deepcopy(state))  # it may keep what it is given
        torch.set_rng_state(self._random)
        set_card_random(self._device, self._card_random)

    def forget(self) -> None:
        """The step is over: nothing of its gradients is left."""
        self.restore()
        if not self._grads:
            self.drop_gradients()

    def drop_gradients(self) -> None:
        """Of this step and of those before."""
        self._grads = []
        for param in self._params:
            param.grad = None


class Phases:
    """Whether a batch has a backward pass after an optimizer's step, as where two nets take turns.

    Then a void step has to undo what the optimizer did, and all of it is kept beforehand. Scripts
    with several optimizers are taken for such until they have shown for a while that they are not.
    """

    def __init__(self) -> None:
        self.stepped = False  # in this batch
        self._num_optimizers = 0
        self._left = KNOWN_BATCHES  # to see before it is known
        self._seen = False

    @property
    def several(self) -> bool:
        """Whether to keep all before an optimizer's step."""
        return self._seen or (self._num_optimizers > 1 and self._left > 0)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """One more takes part."""
        self._num_optimizers += 1
        if isinstance(optimizer, torch.optim.LBFGS):  # calls backward within its step
            self._seen = True

    def begin(self) -> None:
        """A batch is in hand."""
        self.stepped = False
        self._left -= 1

    def backward(self) -> None:
        """A backward pass ends."""
        self._seen = self._seen or self.stepped
