"""Break off a backward pass whose result is not needed any more.

Autograd cannot be stopped, but it computes nothing behind a gradient that is None. So hooks behind
the largest parts of a model replace gradients by None once the pass is to be aborted. A model
smaller than one bucket has no hooks, and they do nothing in a compiled module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Gradients = tuple[torch.Tensor | None, ...]


class AbortHook:
    """A forward hook that can stop the backward pass at its module. Copies of it do nothing."""

    def __init__(self, should_abort: Callable[[], bool] | None = None) -> None:
        self._should_abort = should_abort

    def __call__(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        if self._should_abort is None or torch.compiler.is_compiling():
            return
        if isinstance(out, torch.Tensor) and out.grad_fn is not None:
            out.grad_fn.register_prehook(self._filter)

    def _filter(self, gradients: Gradients) -> Gradients | None:
        assert self._should_abort is not None
        return (None,) * len(gradients) if self._should_abort() else None

    def __deepcopy__(self, memo: object) -> AbortHook:
        return AbortHook()

    def __reduce__(self) -> tuple[type[AbortHook], tuple[()]]:
        return AbortHook, ()


def register_abort_hooks(
    model: torch.nn.Module, should_abort: Callable[[], bool], every_bytes: int
) -> list[Any]:
    """Put a hook behind each stretch of `every_bytes` of parameters. Returns the handles."""
    handles, counted, num_bytes = [], set(), 0
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if id(param) not in counted:
                counted.add(id(param))
                num_bytes += param.numel() * param.element_size()
        if num_bytes >= every_bytes:
            handles.append(module.register_forward_hook(AbortHook(should_abort)))
            num_bytes = 0
    return handles
