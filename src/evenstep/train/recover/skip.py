"""Skip the steps of optimizers and schedulers while a training step is void."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def skip_if(
    is_void: Callable[[], bool], stepper: Any, before: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Skip `stepper.step()` while a step is void, else call `before` first.

    Returns a function that takes the change back.
    """
    step = stepper.step
    original = {"step": stepper.__dict__["step"]} if "step" in stepper.__dict__ else {}

    @functools.wraps(step)  # schedulers find a mark on the optimizer's step that they left there
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if is_void():
            return None
        if before is not None:
            before()
        return step(*args, **kwargs)

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
