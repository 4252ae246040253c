"""Rolls a void step back, so that it can be repeated as if it had never run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from evenstep.errors import EvenstepError
from evenstep.train.comm.cards import card_random, set_card_random
from evenstep.train.recover.flatten import unflatten
from evenstep.train.recover.state import TrainingState
from evenstep.train.recover.undo import UndoRegistered, UndoScheduler
from evenstep.train.step import Step
from evenstep.train.updates import Change

KNOWN_BATCHES = 1000  # after so many, a script has shown whether it alternates


class Alternation:
    """Whether batches have a backward pass after an optimizer step, as when training a GAN.

    A void step then has to undo an optimizer step, so the whole state is saved before each one.
    Scripts with several optimizers are assumed to alternate until they have not done so for a
    while.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.stepped = False  # an optimizer, in this batch
        self._several = len(optimizers) > 1
        self._batches_left = KNOWN_BATCHES
        # LBFGS calls backward inside its step.
        self._seen = any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers)

    @property
    def expected(self) -> bool:
        """Whether to save the whole state before an optimizer step."""
        return self._seen or (self._several and self._batches_left > 0)

    def begin_batch(self) -> None:
        """A batch is in hand."""
        self.stepped = False
        self._batches_left -= 1

    def backward(self) -> None:
        """A backward pass ends."""
        self._seen = self._seen or self.stepped


class Rollback:
    """Saves what a step changes as it goes, and restores it when the step turns out void."""

    def __init__(
        self, step: Step, model: torch.nn.Module, stateful: Mapping[str, Any], state: TrainingState
    ) -> None:
        self._step, self._state = step, state
        self._stateful = stateful  # the script may register more objects later
        objects = list(stateful.values())
        self.alternation = Alternation(
            [obj for obj in objects if isinstance(obj, torch.optim.Optimizer)]
        )
        self._params = list(model.parameters())  # all: a frozen one may be unfrozen later
        self._device = self._params[0].device
        self._buffers = list(model.buffers())
        self._saved_buffers = [b.clone() for b in self._buffers]
        self._scalers = [obj for obj in objects if isinstance(obj, GradScaler)]
        self._saved_scalers: list[Any] = []
        self._saved_grads: list[torch.Tensor | None] = []
        self._schedulers = [UndoScheduler(obj) for obj in objects if isinstance(obj, LRScheduler)]
        self._registered: dict[str, UndoRegistered] = {}
        self._saved_everything: tuple[bytes, list[torch.Tensor]] | None = None
        self._save_random()
        self._version = 0
        self._is_overtaken = False  # other workers are ahead of the script
        self.num_unused_before = 0  # batches accumulated when the step at hand began
        self._counts_before = 0, 0, 0  # reduced steps, the last one's generation, other sums

    def begin_step(self) -> None:
        """A batch is in hand: save what the forward pass is about to change."""
        step = self._step
        self.num_unused_before = step.num_unused
        self._counts_before = step.num_reduced, step.reduced_in, step.num_sums
        if self._buffers:
            torch._foreach_copy_(self._saved_buffers, self._buffers)
        self._saved_scalers = [scaler.state_dict() for scaler in self._scalers]
        self._saved_grads = []
        if step.num_unused or self._is_overtaken:  # gradients of earlier batches, or of others
            self._saved_grads = [None if p.grad is None else p.grad.clone() for p in self._params]
        self._save_random()
        self._version = self._count_changes()
        self._saved_everything = None
        self._find_registered()
        for undo in self._undoes:
            undo.begin_step()
        self.alternation.begin_batch()

    def _find_registered(self) -> None:
        """Find objects that need an undo of their own: optimizers, for one, just do not step."""
        handled = (torch.optim.Optimizer, LRScheduler, GradScaler)
        for name, obj in self._stateful.items():
            if name not in self._registered and not isinstance(obj, handled):
                self._registered[name] = undo = UndoRegistered(name, obj)
                undo.begin_step()

    @property
    def changes(self) -> Mapping[str, Callable[[], Change]]:
        """What tells how each registered object has changed in the step at hand."""
        return {name: undo.change for name, undo in self._registered.items()}

    @property
    def _undoes(self) -> list[UndoScheduler | UndoRegistered]:
        return [*self._schedulers, *self._registered.values()]

    def _save_random(self) -> None:
        self._random, self._card_random = torch.get_rng_state(), None
        if self._device.type == "cuda":  # else no placeholder either: making it takes 30 us
            self._card_random = card_random(self._device)

    def before_optimizer_step(self) -> None:
        """An optimizer is about to step: save everything if a backward pass may follow."""
        if self.alternation.expected and self._saved_everything is None:
            structure, tensors = self._state.flatten()
            self._saved_everything = structure, [tensor.clone() for tensor in tensors]
        self.alternation.stepped = True

    @property
    def is_possible(self) -> bool:
        """Whether the state at the start of the step at hand is still known."""
        return not self.alternation.stepped or self._saved_everything is not None

    @property
    def keeps_parameters(self) -> bool:
        """Whether no parameter was changed in place in the step at hand."""
        return self._version == self._count_changes()

    def _count_changes(self) -> int:
        return sum(p._version for p in self._params)

    @property
    def is_past_reduction(self) -> bool:
        """Whether all workers have reduced the last backward pass of the batch in hand."""
        step = self._step
        is_reduced = step.has_batch and step.num_reduced > step.batch.step
        return is_reduced and (step.stands or not self.alternation.expected)

    def step_is_void(self) -> None:
        """Return to where the step at hand began, and undo what the rest of the loop will change.

        Raises if that state is not known any more.
        """
        if not self.is_possible:
            raise EvenstepError(
                f"step {self._step.number} is void, but an optimizer had already stepped in it "
                "before its last backward pass, for the first time, and that cannot be undone. "
                "Resume from the newest checkpoint with evenstep run --resume."
            )
        self.restore()
        self._keep_registered()

    def overtake(self) -> None:
        """Other workers are ahead of this script: undo what it does until `rejoin`."""
        self.settle()  # it may be overtaken already, as in a second loop over a past epoch
        self._is_overtaken = True
        self.begin_step()
        self._keep_registered()
        self._step.overtake()

    def rejoin(self) -> None:
        """The script has caught up with the others: undo what it did on the way."""
        if self._is_overtaken:
            self._is_overtaken = False
            self._discard()
            self._step.rejoin()

    @property
    def is_due(self) -> bool:
        """Whether there is anything to undo when the loop's body is over."""
        return self._is_overtaken or self._step.is_void

    def settle(self) -> None:
        """The loop's body is over: nothing stays of a void step, its gradients included."""
        self.rejoin()
        if self._step.is_void:
            self._discard()

    def _keep_registered(self) -> None:
        self._find_registered()  # the script may have registered one in this batch
        for undo in self._registered.values():
            undo.step_is_void(self._step.number)

    def restore(self) -> None:
        """Return to where the step at hand began; the loop may go on and change it again.

        Gradients of this step alone stay, since the rest of the loop may look at them; `settle`
        drops them.
        """
        step = self._step
        step.num_unused = self.num_unused_before
        step.num_reduced, step.reduced_in, step.num_sums = self._counts_before
        self._restore()

    @torch.no_grad()
    def _restore(self) -> None:
        if self._saved_everything is not None:
            structure, tensors = self._saved_everything
            self._state.apply(unflatten(structure, [tensor.clone() for tensor in tensors]))
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._saved_buffers)
        for param, grad in zip(self._params, self._saved_grads, strict=False):
            param.grad = None if grad is None else grad.clone()
        for scaler, saved in zip(self._scalers, self._saved_scalers, strict=True):
            scaler.load_state_dict(saved)
        for undo in self._undoes:
            undo.restore()
        torch.set_rng_state(self._random)
        if self._card_random is not None:
            set_card_random(self._device, self._card_random)

    def _discard(self) -> None:
        self._restore()
        if not self._saved_grads:
            self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop the gradients of this step and of earlier ones."""
        self._saved_grads = []
        for param in self._params:
            param.grad = None
