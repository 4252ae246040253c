"""Rolls a void step back, so that it can be repeated as if it had never run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from evenstep.errors import ConfigError
from evenstep.train.recover.state import TrainingState
from evenstep.train.recover.undo import Undo
from evenstep.train.step import Step

KNOWN_BATCHES = 1000  # after which a script has shown whether it alternates


class Alternation:
    """Whether batches have a backward pass after an optimizer step, as when training a GAN.

    A void step then has to undo an optimizer step, so the whole state is saved before each one.
    Scripts with several optimizers are assumed to alternate until they have shown for a while that
    they do not.
    """

    def __init__(self) -> None:
        self.stepped = False  # an optimizer, in this batch
        self._num_optimizers = 0
        self._batches_left = KNOWN_BATCHES
        self._seen = False

    @property
    def expected(self) -> bool:
        """Whether to save the whole state before an optimizer step."""
        return self._seen or (self._num_optimizers > 1 and self._batches_left > 0)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """One more optimizer takes part."""
        self._num_optimizers += 1
        if isinstance(optimizer, torch.optim.LBFGS):  # calls backward inside its step
            self._seen = True

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
        scalers = [obj for obj in stateful.values() if isinstance(obj, torch.amp.GradScaler)]
        self._undo, self.alternation = Undo(model, scalers), Alternation()
        self.num_unused_before = 0  # batches accumulated when the step at hand began
        self._releases: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Skip the steps of optimizers and schedulers in void steps, until `detach`."""
        for stepper in self._stateful.values():
            before = None
            if isinstance(stepper, torch.optim.Optimizer):
                before = self._before_optimizer_step
                self.alternation.add(stepper)
            if isinstance(stepper, torch.optim.Optimizer | LRScheduler):
                self._releases.append(skip_if_void(self._step, stepper, before))

    def detach(self) -> None:
        """Make optimizers and schedulers step as before again."""
        while self._releases:
            self._releases.pop()()  # the last first: an object may be wrapped twice

    def begin_step(self) -> None:
        """A batch is in hand: save what the forward pass is about to change."""
        self.num_unused_before = self._step.num_unused
        self._undo.save(accumulating=self._step.num_unused > 0)
        self.alternation.begin_batch()

    def _before_optimizer_step(self) -> None:
        if self.alternation.expected and not self._undo.has_everything:
            self._undo.save_everything(self._state)
        self.alternation.stepped = True

    @property
    def is_possible(self) -> bool:
        """Whether the state at the start of the step at hand is still known."""
        return not self.alternation.stepped or self._undo.has_everything

    def step_is_void(self) -> None:
        """From here on, undo what the rest of the loop does to registered objects too."""
        # Optimizers and schedulers are skipped, and scalers are saved in every step.
        handled = (torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
        registered = [obj for obj in self._stateful.values() if not isinstance(obj, handled)]
        self._undo.save_registered(registered)

    def restore(self) -> None:
        """Return to the state in which the step at hand began."""
        self._step.num_unused = self.num_unused_before
        self._undo.restore()

    def finish(self) -> None:
        """The loop is done with the void step: nothing of it stays."""
        self._undo.finish()

    def drop_gradients(self) -> None:
        """The gradients here belong to batches that the other workers' optimizers have used."""
        self._undo.drop_gradients()


def skip_if_void(
    step: Step, stepper: Any, before: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Skip `stepper.step()` while the training step is void, else call `before` first.

    Returns a function that takes the change back.
    """
    take_step = stepper.step
    original = {"step": stepper.__dict__["step"]} if "step" in stepper.__dict__ else {}

    @functools.wraps(take_step)  # keeps the mark that schedulers leave on it
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if step.is_void:
            return None
        if before is not None:
            before()
        return take_step(*args, **kwargs)

    if isinstance(stepper, torch.optim.Optimizer):
        stepper.__dict__["step"] = guarded  # as schedulers do

        def undo() -> None:
            if stepper.__dict__.get("step") is guarded:  # else a scheduler has wrapped it since
                del stepper.__dict__["step"]
                stepper.__dict__.update(original)
    else:
        # A scheduler's attributes are its state_dict, so none may be added: change its class.
        kind = type(stepper)
        stepper.__class__ = type(kind.__name__, (kind,), {"step": staticmethod(guarded)})

        def undo() -> None:
            stepper.__class__ = kind

    return undo


def check_schedulers(objects: Iterable[Any]) -> None:
    """Raise if an optimizer has a scheduler that was not given to the session."""
    objects = list(objects)
    known = {id(obj.optimizer) for obj in objects if isinstance(obj, LRScheduler)}
    for optimizer in objects:
        if not isinstance(optimizer, torch.optim.Optimizer) or id(optimizer) in known:
            continue
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # a mark that schedulers leave
            raise ConfigError(
                "scheduler",
                f"the one of {type(optimizer).__name__} is not known to the run: workers that join "
                "would begin its schedule anew. Pass it along: session.prepare(model, optimizer, "
                "scheduler)",
            )
