"""What the learning rate is multiplied by where the global batch changes with the workers.

The user's optimizer and scheduler know nothing of it: the factor is put on for the length of
`optimizer.step()` and taken off again, so schedules, checkpoints and logs keep the user's own rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Rate:
    """A factor that goes from one value to the next, at once or over some steps."""

    def __init__(self) -> None:
        self._step, self._from, self._to, self._over = 0, 1.0, 1.0, 0
        self._now = 0
        self._plain: dict[int, list[Any]] = {}  # the user's own rates while a step is taken

    @property
    def target(self) -> float:
        """The factor that it is at, or on its way to."""
        return self._to

    def aim(self, step: int, factor: float, over_steps: int = 0) -> None:
        """From a step on go to a factor, over so many steps."""
        self._from, self._step = self.at(step), step
        self._to, self._over = factor, over_steps

    def steps_left(self, step: int) -> int:
        """At the beginning of a step: how many until the factor is where it goes."""
        return max(0, self._step + self._over - step)

    def at(self, step: int) -> float:
        """The factor of a step."""
        done = step - self._step + 1
        if done <= 0:
            return self._from
        if done >= self._over:
            return self._to
        return self._from + (self._to - self._from) * done / self._over

    def begin_step(self, step: int) -> None:
        """Whatever an optimizer does from here on belongs to this step."""
        self._now = step

    def attach(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Apply the factor in every step of this optimizer. Returns a function that detaches it."""
        hooks = (
            optimizer.register_step_pre_hook(self._put_on),
            optimizer.register_step_post_hook(self._take_off),
        )

        def detach() -> None:
            for hook in hooks:
                hook.remove()
            self._take_off(optimizer)  # of a step that raised

        return detach

    def _put_on(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._take_off(optimizer)  # of a step before that raised
        factor = self.at(self._now)
        if factor != 1.0:
            groups = optimizer.param_groups
            self._plain[id(optimizer)] = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] = group["lr"] * factor  # a new one, where the rate is a tensor

    def _take_off(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, lr in zip(
            optimizer.param_groups, self._plain.pop(id(optimizer), []), strict=False
        ):
            group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """For a worker that joins."""
        return {"step": self._step, "from": self._from, "to": self._to, "over": self._over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as another worker does."""
        self._step, self._from = state["step"], state["from"]
        self._to, self._over = state["to"], state["over"]
