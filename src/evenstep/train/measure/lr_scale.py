"""The factor on the learning rate where the global batch changes with the number of workers.

Optimizers and schedulers do not see it: the factor is applied for the duration of
`optimizer.step()` only, so schedules, checkpoints and logs keep the user's own learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from evenstep.train.step import Step


class LrScale:
    """A factor that moves from one value to the next, at once or linearly over some steps."""

    def __init__(self, step: Step) -> None:
        self._current = step
        self._step, self._from, self._to, self._over = 0, 1.0, 1.0, 0
        self._unscaled: dict[int, list[Any]] = {}  # the user's own rates during an optimizer step

    @property
    def target(self) -> float:
        """The current factor, or the one at the end of the warm-up."""
        return self._to

    def set_target(self, step: int, factor: float, over_steps: int = 0) -> None:
        """Move to a factor from a step on, linearly over so many steps."""
        self._from, self._step = self.at(step), step
        self._to, self._over = factor, over_steps

    def steps_left(self, step: int) -> int:
        """Steps left, at the start of a step, until the target is reached."""
        return max(0, self._step + self._over - step)

    def at(self, step: int) -> float:
        """The factor at a step."""
        done = step - self._step + 1
        if done <= 0:
            return self._from
        if done >= self._over:
            return self._to
        return self._from + (self._to - self._from) * done / self._over

    def attach(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Apply the factor in every step of this optimizer. Returns a function that detaches it."""
        hooks = (
            optimizer.register_step_pre_hook(self._apply),
            optimizer.register_step_post_hook(self._remove),
        )

        def detach() -> None:
            for hook in hooks:
                hook.remove()
            self._remove(optimizer)  # left over from a step that raised

        return detach

    def _apply(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._remove(optimizer)  # left over from a step that raised
        factor = self.at(self._current.batch.step)
        if factor != 1.0:
            groups = optimizer.param_groups
            self._unscaled[id(optimizer)] = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] = group["lr"] * factor  # not in place: it may be a tensor

    def _remove(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, lr in zip(
            optimizer.param_groups, self._unscaled.pop(id(optimizer), []), strict=False
        ):
            group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """For joiners and checkpoints."""
        return {"step": self._step, "from": self._from, "to": self._to, "over": self._over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another worker is."""
        self._step, self._from = state["step"], state["from"]
        self._to, self._over = state["to"], state["over"]
